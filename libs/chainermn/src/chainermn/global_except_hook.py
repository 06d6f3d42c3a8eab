"""End the whole job when one rank fails.

A rank that dies of an uncaught exception leaves the others waiting for it for ever. With this
hook it prints its traceback, with its rank, and ends all of them. `create_communicator` installs
it; a script that may fail before can call `add_hook` itself, and a user can ask for it from
outside by setting ``CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS=1``.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from types import TracebackType
from typing import Any

from chainermn import failures, resuming

#: Either of them, not empty, installs the hook when ``chainermn`` is imported.
VARIABLES = ("CHAINERMN_FORCE_ABORT_ON_EXCEPTION", "CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS")

_SECONDS_FOR_EACH = 0.03

_previous_hook = sys.__excepthook__
_pid = 0


def add_hook() -> None:
    """Install the hook. Doing so again changes nothing."""
    global _previous_hook, _pid
    _pid = os.getpid()
    if sys.excepthook is not _abort_job:
        _previous_hook = sys.excepthook
        sys.excepthook = _abort_job


def add_hook_if_enabled() -> None:
    """Install the hook if one of `VARIABLES` asks for it."""
    if any(os.environ.get(variable) for variable in VARIABLES):
        add_hook()


def _abort_job(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    resuming.explain(error)
    # A rank without MPI just exits, which mpiexec notices by itself; so does a forked child,
    # which must not touch the MPI of its parent.
    mpi: Any = sys.modules.get("mpi4py.MPI")
    alive = mpi and mpi.Is_initialized() and not mpi.Is_finalized() and os.getpid() == _pid
    if not alive or mpi.COMM_WORLD.size == 1:
        _previous_hook(kind, error, trace)
        return
    if isinstance(error, MemoryError):
        traceback.clear_frames(trace)  # what they hold is needed from here on
    rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    lines = [
        f"chainermn: rank {rank} of {size} on {socket.gethostname()} failed; "
        "the whole job is being ended.\n",
        *traceback.format_exception(kind, error, trace),
    ]
    # Ranks that fail alike print one after the other.
    failures.end_job(
        "".join(lines),
        after=min(rank, 10) * _SECONDS_FOR_EACH,
        announce=failures.say_failing,
    )
