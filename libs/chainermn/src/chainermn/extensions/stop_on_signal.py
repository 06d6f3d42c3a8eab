"""Stop all ranks with a checkpoint when a job gets a signal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import chainer
from chainer.training.extension import Extension

from chainermn.agreement import check_equal, run_together
from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._multi_node_snapshot import MultiNodeSnapshot

# Ranks ask each other about this often, however long an iteration takes.
_SECONDS_BETWEEN = 1.0


class StopOnSignal(Extension):
    """Extension that writes a checkpoint and ends the program when any rank gets a signal.

    Slurm sends signals before a time limit, and when another job takes the nodes (preemption).

    Create this extension on every rank, at the start of your script, before iterators that start
    processes. Until then, the signals end the program at once, and processes that were started
    before do not ignore them.

    All ranks stop at the end of the same iteration, even if only one rank gets the signal. This
    iteration counts as finished, so a resumed run equals one that was never stopped. Then
    ``trainer.run()`` raises SystemExit with the exit code 75 (``EX_TEMPFAIL``), which means "run
    me again": a batch script can requeue the job, and ``chainermn launch`` does not restart it.
    A signal that comes too late has no effect, and training ends as usual.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of all ranks.
    checkpoint : callable
        Function that writes the checkpoint; every rank calls it with the trainer. Use a
        checkpointer, or a snapshot extension from `multi_node_snapshot`.
    signals : sequence of signal.Signals
        Signals to stop for.

    Attributes
    ----------
    exit_code : int
        Exit code of the program, 75.

    Raises
    ------
    TypeError
        If ``comm`` is not a communicator.
    ValueError
        On every rank, if an argument is invalid, if ranks pass different signals, or if this is
        not the main thread, because only the main thread can handle signals.

    Notes
    -----
    Ranks ask each other about once per second, or after every iteration if that takes longer.
    This takes one small message per rank. It delays the checkpoint by up to a second, so have the
    signal sent early enough, for example with ``--signal=USR1@90``.

    Slurm and MPICH's ``mpiexec`` send signals to every process of a job. Processes that a rank
    starts after it has created this extension, or with `start_forkserver`, ignore these signals,
    except SIGTERM, which ends them. A rank would wait forever for worker processes of its
    iterators that have ended. So use ``[signal.SIGUSR1]`` with such iterators.

    ``mpiexec`` itself ends all ranks when it gets SIGTERM. So ranks can stop with a checkpoint for
    SIGTERM only if they get it directly, for example from ``srun``. Both MPIs pass SIGUSR1 on.

    Examples
    --------
    >>> checkpointer = chainermn.create_multi_node_checkpointer("job", comm)
    >>> stop = chainermn.extensions.StopOnSignal(comm, checkpointer)
    >>> # Create iterators, updater and trainer here.
    >>> trainer.extend(checkpointer, trigger=(1000, "iteration"))
    >>> trainer.extend(stop)
    >>> checkpointer.maybe_load(trainer)
    >>> trainer.run()
    """

    trigger = 1, "iteration"
    priority = -2000  # after everything that belongs to the iteration
    exit_code = os.EX_TEMPFAIL

    def __init__(
        self,
        comm: CommunicatorBase,
        checkpoint: Callable[[chainer.training.Trainer], object],
        signals: Sequence[int] = (signal.SIGUSR1, signal.SIGTERM),
    ) -> None:
        where = "StopOnSignal"
        check_communicator(f"{where}(comm, checkpoint)", comm, checkpoint)
        self.comm, self.checkpoint = comm, checkpoint
        self._received: signal.Signals | None = None
        self._previous: dict[int, Any] = {}
        self._mask: set[Any] | None = None
        self._next_check = 0
        self._last_check = 0, 0.0

        def install() -> Sequence[int]:
            if isinstance(checkpoint, type) or not callable(checkpoint):
                raise ValueError(
                    "checkpoint must be a checkpointer, a snapshot extension or another function "
                    f"of the trainer, got {checkpoint!r:.80}"
                )
            numbers = sorted(signal.Signals(number) for number in signals)
            if {signal.SIGKILL, signal.SIGSTOP} & {*numbers}:
                raise ValueError("no program can handle SIGKILL or SIGSTOP")
            for number in numbers:
                self._previous[number] = signal.signal(number, self._note)
            # Processes that this one starts from now on inherit the mask. SIGTERM ends workers.
            blocked = set(numbers) - {signal.SIGTERM, signal.SIGINT}
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            return numbers

        try:
            check_equal(comm, run_together(comm, where, install), where)
        except Exception:  # of any type, on a rank where another one failed
            self.finalize()
            raise

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Start to count iterations."""
        self._next_check = 0
        self._last_check = trainer.updater.iteration, time.monotonic()

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Stop if a rank has received a signal. Every rank must call it in the same iteration."""
        iteration = trainer.updater.iteration
        if iteration < self._next_check:
            return
        last, then = self._last_check
        self._last_check = iteration, time.monotonic()
        microseconds = int(1e6 * (self._last_check[1] - then))
        for number in signal.sigpending() & self._previous.keys():
            self._note(number, None)
        received = self._received and self._received.name
        everywhere = self.comm.allgather_obj((microseconds, received))
        for rank, (_, name) in enumerate(everywhere):
            if name:
                self._stop(trainer, rank, name)
        total = sum(taken for taken, _ in everywhere)
        done = max(1, iteration - last)
        fitting = int(_SECONDS_BETWEEN * 1e6) * self.comm.size * done // max(1, total)
        # The time of the first iterations tells little about the others.
        self._next_check = iteration + max(1, min(fitting, 2 * done))

    def finalize(self) -> None:
        """Restore the handlers that the signals had before."""
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._mask = None
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)

    def _stop(self, trainer: chainer.training.Trainer, rank: int, name: str) -> NoReturn:
        self.checkpoint(trainer)
        if isinstance(self.checkpoint, MultiNodeSnapshot):
            self.checkpoint.wait()
        self.comm.allgather_obj(None)  # mpiexec may end the others once a rank has exited
        if self.comm.rank == 0:
            print(
                f"chainermn: rank {rank} got {name}: the checkpoint of iteration "
                f"{trainer.updater.iteration} is written; exit code {self.exit_code} means that "
                "the job can be started again",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(self.exit_code)
