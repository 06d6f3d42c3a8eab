"""One rank of `chainermn.launch.run`: connect to the caller and call its function.

This does not import the caller's script. It ends as soon as the caller ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection

from chainermn.failures import stop_watching
from chainermn.launch.connections import JOB, connect, take_endpoint
from chainermn.launch.failure import Failure
from chainermn.launch.pickles import dumps
from chainermn.process.processes import find, inheriting, numbers_in, shared_memory_of, unlink_all


def main() -> None:
    """Call the function that the caller sends, and send it the result."""
    numbers = numbers_in(os.environ)
    assert numbers is not None, "only mpiexec may start this"
    rank = numbers.rank
    endpoint = take_endpoint(os.environ)
    for stream in ("stdout", "stderr"):
        _redirect(stream, connect(endpoint, rank, stream))
    caller = _closed_first(connect(endpoint, rank, "call"))
    os.register_at_fork(after_in_child=caller.close)
    try:
        search_path, call = caller.recv()
    except (EOFError, OSError):  # the caller has ended, or other ranks have not started
        return
    search_path.apply()
    watcher = threading.Thread(target=_end_with, args=(caller, os.environ[JOB]), daemon=True)
    watcher.start()
    pid = os.getpid()
    outcome = _outcome(rank, call)
    if os.getpid() != pid:  # in a child that the function has forked
        return
    caller.send(outcome)
    if isinstance(outcome, Failure):
        watcher.join()


def _redirect(stream: str, connection: Connection) -> None:
    """Redirect a stream of this process and its children to the caller."""
    number = {"stdout": 1, "stderr": 2}[stream]
    os.dup2(connection.fileno(), number)
    connection.close()
    getattr(sys, stream).reconfigure(encoding="utf-8", errors="backslashreplace")


def _closed_first(connection: Connection) -> Connection:
    """Move a connection to a number above those of MPI, so that its end precedes theirs.

    As a process ends, Linux closes its files from the highest number down. From MPI's, mpiexec
    and other ranks learn of it, and then the others end, too: the caller must know who was first.
    """
    lowest = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    with connection:
        return Connection(fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, lowest))


def _end_with(caller: Connection, job: str) -> None:
    """When the caller hangs up, end this process and all that the ranks here have started."""
    with contextlib.suppress(EOFError, OSError):
        caller.recv_bytes()
    unlink_all(shared_memory_of(os.getpid()))
    stop_watching()
    # Includes children of other ranks: mpiexec may kill those ranks before they get here.
    for process in inheriting(JOB, job):
        parent = find(process.parent)
        is_rank = parent is not None and parent.is_launcher
        if not (is_rank or process.is_launcher or process.is_helper):
            process.kill()
    # mpiexec always takes a signal as a failed job, but not always an exit code.
    os.kill(os.getpid(), signal.SIGKILL)


def _outcome(rank: int, call: bytes) -> bytes | Failure:
    """Return the pickled result of a call, or a description of its failure."""
    pid = os.getpid()
    try:
        try:
            function, arguments = pickle.loads(call)  # noqa: S301  # sent by our caller
        except Exception as error:
            raise RuntimeError(
                f"rank {rank} cannot load the function or its arguments: "
                f"{type(error).__name__}: {error}. Install the modules that they need on every "
                "host"
            ) from None
        result = function(*arguments)
        try:
            return dumps(result)
        except Exception as error:
            raise TypeError(
                f"the result of rank {rank} cannot be pickled, so it cannot be sent back: "
                f"{error}. Return numbers, arrays or strings instead of {type(result).__name__}"
            ) from None
    except BaseException as error:
        if os.getpid() != pid:
            raise
        if isinstance(error, SystemExit):
            what = f"rank {rank} called sys.exit({error.code!r}) inside the function"
            error = RuntimeError(what).with_traceback(error.__traceback__)
        return Failure.of(error, hidden_frames=1)
