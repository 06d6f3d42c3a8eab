"""End the whole job when one rank fails.

Without this hook, a rank that ends with an uncaught exception leaves the others waiting forever.
With it, the rank prints its traceback and its number, and ends the job. If several ranks fail in
the same way, only one prints the traceback. An interrupt (Ctrl-C) prints one line.

`create_communicator` installs the hook. For failures before that call, use `add_hook`, or set
``CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS=1``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from types import TracebackType
from typing import Any, NoReturn

from chainermn import failures, resuming
from chainermn.process.main_thread import Place, users_places
from chainermn.process.processes import launched_as

#: Environment variables. If one of them is set, importing ``chainermn`` installs the hook.
VARIABLES = ("CHAINERMN_FORCE_ABORT_ON_EXCEPTION", "CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS")

# Status of CuPy's error in a script that uses GPU number `comm.intra_rank`.
_NO_SUCH_GPU = 101  # cudaErrorInvalidDevice
_CHOOSE_DEVICE = (
    "There is no GPU with this number: each rank may see only its own, as number 0, or a host has "
    "more ranks than GPUs. Use chainermn.choose_device(comm) instead of "
    "chainer.get_device_from_id(comm.intra_rank).use()."
)

_previous_hook = sys.__excepthook__
_pid = 0


def add_hook() -> None:
    """Install the hook, unless it is already installed.

    Examples
    --------
    Call it at the start of a script, for errors before `create_communicator`:

    >>> chainermn.global_except_hook.add_hook()
    """
    global _previous_hook, _pid
    _pid = os.getpid()
    if sys.excepthook is not _abort_job:
        _previous_hook = sys.excepthook
        sys.excepthook = _abort_job


def add_hook_if_enabled() -> None:
    """Install the hook if one of the environment variables in `VARIABLES` is set.

    Examples
    --------
    >>> chainermn.global_except_hook.add_hook_if_enabled()  # as ``import chainermn`` does
    """
    if any(os.environ.get(variable) for variable in VARIABLES):
        add_hook()


def exit_job(message: str) -> NoReturn:
    """End the whole job from one rank, with a one-line message instead of a traceback.

    Use it if one rank finds damaged input during training, where the other ranks do not call
    `chainermn.agreement.exit_together`. Not collective.

    Parameters
    ----------
    message : str
        Description of the problem and of what to do.

    Raises
    ------
    SystemExit
        If there is only one rank. Otherwise the function does not return.

    Examples
    --------
    >>> chainermn.global_except_hook.exit_job("images/7.png is damaged: download it again")
    Traceback (most recent call last):
        ...
    SystemExit: error: images/7.png is damaged: download it again
    """
    rank, size = _rank_and_size()
    if size == 1:
        raise SystemExit(f"error: {message}")
    text = f"error: {message} (rank {rank} of {size} on {socket.gethostname()} ends the job)"
    _end_job(rank, text, f"error: {message}")


def _abort_job(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    resuming.explain(error)
    if isinstance(error, RuntimeError) and getattr(error, "status", None) == _NO_SUCH_GPU:
        error.add_note(_CHOOSE_DEVICE)
    rank, size = _rank_and_size()
    if size == 1:
        _previous_hook(kind, error, trace)
        return
    if isinstance(error, MemoryError):
        traceback.clear_frames(trace)  # frees memory that is needed below
    me = f"rank {rank} of {size} on {socket.gethostname()}"
    if isinstance(error, KeyboardInterrupt):
        reason = failures.INTERRUPTED
        text = f"chainermn: interrupted (Ctrl-C){_progress(trace)}: {me}{_place(trace)}. "
        text += "Ending the whole job."
    else:
        reason = "".join(traceback.format_exception(kind, error, trace))
        text = f"chainermn: {me} failed; ending the whole job. "
        text += f"Ranks that fail in the same way do not repeat this.\n{reason}"
    _end_job(rank, text, reason)


def _end_job(rank: int, text: str, reason: str) -> NoReturn:
    """Print a text, unless another rank printed it for the same reason, and end the job."""
    failures.end_job(
        text,
        # Ranks that fail in different ways then print one after another.
        after=min(rank, 10) * 0.03,
        announce=lambda: failures.say_failing(reason),
    )


def _rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; 0 and 1 outside a job."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if os.getpid() != _pid:  # a forked child must not touch the MPI of its parent
        return 0, 1
    if not mpi or not mpi.Is_initialized():
        # Before that, MPICH's mpiexec ignores exit codes.
        numbers = launched_as()
        return numbers[:2] if numbers else (0, 1)
    return (0, 1) if mpi.Is_finalized() else (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size)


def _progress(trace: TracebackType | None) -> str:
    """Return the progress of the trainer; empty if none is running."""
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_name == "run":
            with contextlib.suppress(Exception):  # not a trainer's
                return f" after {frame.f_locals['self'].updater.iteration} iterations"
    return ""


def _place(trace: TracebackType | None) -> str:
    """Return where this rank was in the user's code."""
    stack = [Place(it.filename, str(it.lineno), it.name) for it in traceback.extract_tb(trace)]
    known = users_places(stack) or stack
    return f" was at {known[-1]}" if known else ""
