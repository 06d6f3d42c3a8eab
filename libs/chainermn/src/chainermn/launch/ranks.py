"""The ranks that make one call for `chainermn.launch.run`, as the caller sees them."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from chainermn.launch.connections import Listener, hang_up
from chainermn.launch.failure import Failure
from chainermn.launch.output import Output
from chainermn.launch.surroundings import Surroundings

# Seconds for all ranks to connect.
_START_LIMIT = 120.0
# Seconds between two looks at mpiexec.
_PERIOD = 0.1
# Seconds in which others may fail in the same way, so that the lowest rank is the one named.
_SECONDS_FOR_OTHERS = 0.2
# Seconds for mpiexec to say how a rank has ended.
_SECONDS_FOR_A_REASON = 5.0
# Seconds for mpiexec to end once nobody listens to the ranks any more.
_SECONDS_FOR_THE_END = 30.0
# Seconds for ranks that have returned to leave MPI.
_SECONDS_TO_LEAVE = 60.0
# Seconds for what has been printed to arrive once mpiexec has ended: a process that the function
# has left behind may print without end.
_SECONDS_FOR_OUTPUT = 5.0
# Seconds for ranks to end themselves because nobody listens any more.
_SECONDS_TO_END = 1.0

# As MPICH and Open MPI report a process that a signal has ended, and Open MPI an exit code.
_SIGNAL = re.compile(r"PID (\d+).*?(?:\(|on\s+)signal\s+(\d+)", re.DOTALL)
_EXIT_CODE = re.compile(r"Exit code:\s+(\d+)")


class Ranks:
    """Ranks that all make the same call; a context manager, which ends them.

    All is done by the thread that calls, so an interrupt ends it anywhere, and output appears
    where that of the caller does.

    Parameters
    ----------
    size : int
        Number of ranks.
    listener : Listener
        What they connect to.
    mpiexec : subprocess.Popen
        It has started, or is about to start, `chainermn.launch.worker` on each rank.
    """

    def __init__(self, size: int, listener: Listener, mpiexec: subprocess.Popen[bytes]) -> None:
        self._size, self._listener, self._mpiexec = size, listener, mpiexec
        self._printed = b""  # by mpiexec
        self._connections: dict[int, Connection] = {}
        self._outputs: dict[Connection, Output] = {}
        self._pids: dict[int, int] = {}
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, Failure] = {}
        self._dead: list[int] = []
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._listen_to(listener, self._accept)
        assert mpiexec.stdout is not None
        self._listen_to(mpiexec.stdout, functools.partial(self._hear_mpiexec, mpiexec.stdout))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        self._hang_up()
        left, deadline = [*self._connections.values()], time.monotonic() + _SECONDS_TO_END
        while left and (gone := wait(left, max(0.0, deadline - time.monotonic()))):
            left = [connection for connection in left if connection not in gone]
        for connection in (*self._connections.values(), *self._outputs):
            connection.close()

    def call(self, call: bytes) -> list[Any]:
        """Have each rank make a call; return the results by rank.

        Raises
        ------
        Exception
            That of the lowest rank that raises, or RuntimeError if a rank ends in another way.
        """
        self._serve(lambda: self._has_started() or bool(self._dead), _START_LIMIT)
        if not self._has_started():
            self._end()
            raise self._error_of_start()
        message = pickle.dumps((Surroundings.here(), call))
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # of a rank that has died, as is noticed below
                connection.send_bytes(message)
        self._serve(self._is_decided, float("inf"))
        if self._failures:
            self._serve(lambda: len(self._failures) == self._size, _SECONDS_FOR_OTHERS)
            self._end()  # what a rank has printed may come after its exception
            first = min(self._failures)
            raise self._failures[first].as_exception(first)
        missing = [*self._dead] or sorted({*range(self._size)} - {*self._results})
        if missing:
            self._serve(self._has_ended, _SECONDS_FOR_A_REASON)
            self._end()  # before MPI is initialised, MPICH's mpiexec goes on
            raise self._error_of_death(missing)
        self._serve(self._has_ended, _SECONDS_TO_LEAVE)
        if self._mpiexec.poll() != 0:
            raise self._error_of_leaving()
        sys.stderr.write(self._printed.decode(errors="replace"))
        return [self._result(rank) for rank in range(self._size)]

    def _hang_up(self) -> None:
        """Let the ranks end themselves."""
        for connection in self._connections.values():
            hang_up(connection)

    def _end(self) -> None:
        """Let the ranks end themselves, and hear what they and mpiexec have still to say."""
        self._is_over = True
        self._hang_up()
        self._serve(self._has_ended, _SECONDS_FOR_THE_END)

    def _listen_to(self, source: Any, act: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _serve(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Do what comes up until something is true, mpiexec has ended, or the time is over."""
        deadline, has_ended = time.monotonic() + seconds, False
        while not is_done() and time.monotonic() < deadline:
            if not has_ended and self._mpiexec.poll() is not None:
                deadline = min(deadline, time.monotonic() + _SECONDS_FOR_OUTPUT)
                has_ended = True
            # What has been printed before mpiexec ended is there by now.
            ready = self._selector.select(_PERIOD)
            for key, _ in ready:
                key.data()
            self._accept()  # also drops strangers who say nothing
            if has_ended and not ready:
                return

    def _has_started(self) -> bool:
        return len(self._connections) == self._size

    def _is_decided(self) -> bool:
        return bool(self._failures or self._dead) or len(self._results) == self._size

    def _has_ended(self) -> bool:
        is_read = self._mpiexec.stdout not in self._selector.get_map()
        return self._mpiexec.poll() is not None and is_read and not self._outputs

    def _accept(self) -> None:
        for connection, (rank, purpose, _, pid) in self._listener.accept():
            if purpose == "call":
                self._connections[rank], self._pids[rank] = connection, pid
                if self._is_over:  # it has come too late
                    hang_up(connection)
                self._listen_to(connection, functools.partial(self._hear, rank, connection))
            else:
                self._outputs[connection] = Output(rank, purpose)
                self._listen_to(connection, functools.partial(self._relay, connection))

    def _hear(self, rank: int, caller: Connection) -> None:
        try:
            outcome = caller.recv()
        except (EOFError, OSError):
            self._selector.unregister(caller)
            if rank not in self._results and rank not in self._failures:
                self._dead.append(rank)
        else:
            kept: dict[int, Any] = (
                self._failures if isinstance(outcome, Failure) else self._results
            )
            kept[rank] = outcome

    def _relay(self, connection: Connection) -> None:
        data = _read(connection)
        self._outputs[connection].write(data)
        if not data:
            self._selector.unregister(connection)
            self._outputs.pop(connection).close()
            connection.close()

    def _hear_mpiexec(self, pipe: IO[bytes]) -> None:
        data = _read(pipe)
        self._printed += data
        if not data:
            self._selector.unregister(pipe)

    def _result(self, rank: int) -> Any:
        try:
            return pickle.loads(self._results[rank])  # noqa: S301  # from a rank of ours
        except Exception as error:
            raise RuntimeError(
                f"the result of rank {rank} cannot be unpickled by the caller: "
                f"{type(error).__name__}: {error}. Return numbers, arrays or texts instead"
            ) from error

    def _error_of_start(self) -> RuntimeError:
        missing = sorted({*range(self._size)} - {*self._connections})
        return RuntimeError(
            f"{len(missing)} of {self._size} ranks have not started: {missing}; mpiexec "
            f"{self._how_mpiexec_ended()} and printed: {self._words()}"
        )

    def _error_of_leaving(self) -> RuntimeError:
        how = self._how_mpiexec_ended(f"within {_SECONDS_TO_LEAVE:.0f} s")
        return RuntimeError(
            f"the function has returned on all {self._size} ranks, but thereafter mpiexec {how}. "
            f"Has each message that was sent been received? mpiexec printed: {self._words()}"
        )

    def _how_mpiexec_ended(self, limit: str = "by itself") -> str:
        code = self._mpiexec.poll()
        return f"has not ended {limit}" if code is None else f"ended with exit code {code}"

    def _error_of_death(self, suspects: Sequence[int]) -> RuntimeError:
        words = self._words()
        signals = {int(pid): int(number) for pid, number in _SIGNAL.findall(words)}
        # Several may be heard of at once, as mpiexec ends the others.
        rank = next((r for r in suspects if self._pids[r] in signals), suspects[0])
        # MPICH may name one of the others, to which it has sent SIGKILL.
        others = (number for number in signals.values() if number != signal.SIGKILL)
        number = signals.get(self._pids[rank], next(others, None))
        if number is not None:
            how = f"was killed by signal {number} ({_name_of(number)})"
        elif found := _EXIT_CODE.search(words):
            how = f"ended with exit code {found[1]}"
        elif not self._printed and self._mpiexec.poll():  # MPICH's exit code is that of the rank
            how = f"ended with exit code {self._mpiexec.returncode}"
        else:
            how = "was killed, has crashed or has called os._exit"
        return RuntimeError(
            f"rank {rank} of {self._size} {how} before the function returned; "
            "its output may say why"
        )

    def _words(self) -> str:
        """Return what mpiexec has printed."""
        return self._printed.decode(errors="replace").strip() or "nothing"


def _name_of(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:  # those for real time have no names of their own
        return signal.strsignal(number)


def _read(source: Any) -> bytes:
    try:
        return os.read(source.fileno(), 1 << 16)
    except OSError:  # the other end has been killed
        return b""
