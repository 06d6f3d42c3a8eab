"""Process beside each starting rank that ends the job if other ranks never start.

mpi4py initialises MPI without releasing the GIL, so no thread of the rank can do this. When a rank
exits before it initialises MPI, MPICH's ``mpiexec`` lets the others wait forever (5.0.2, whatever
the exit code); Open MPI's ends the job (5.0.11). When a rank never gets there, both wait.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

from chainermn.failures import watch
from chainermn.failures.clock import stall_limit, turn
from chainermn.failures.ending import print_at_once, start_reaper
from chainermn.failures.helper import start_helper
from chainermn.failures.processes import (
    Process,
    all_processes,
    environment_of,
    find,
    launchers_of,
    numbers_in,
)

_PERIOD = 0.25
# mpiexec may still be starting ranks, or be about to end the job by itself.
_SECONDS_TO_BE_SURE = 1.5


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Guard this rank while it initialises MPI and first meets the others.

    From then on, a crash prints the stack (`faulthandler`). A rank that is already watched needs
    no guard. Raises ValueError if the stall limit is not a number of seconds.
    """
    arguments = {"pid": os.getpid(), "limit": stall_limit()}
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # no standard error to write to
            faulthandler.enable()
    numbers = numbers_in(os.environ)
    if watch.is_on() or numbers is None or numbers.size == 1:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            guard = stack.enter_context(start_helper("guard", arguments))
            stack.callback(guard.kill)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Python cannot handle an interrupt inside MPI: it has to end the process at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            stack.callback(signal.signal, signal.SIGINT, signal.default_int_handler)
        yield


def main(pid: int, limit: float) -> None:
    """Guard the rank in a process, whose environment this one has inherited, until it has ended.

    Its start may take ``limit`` seconds; 0 for no limit.
    """
    me, numbers = find(pid), numbers_in(os.environ)
    if me is None or numbers is None:
        return
    rank, size, local_size = numbers
    launchers = launchers_of(pid)
    host = socket.gethostname()
    waited = missing = 0.0
    left: list[int] = []  # before others are ended because of the first
    while me.is_alive():
        time.sleep(_PERIOD)
        waited += _PERIOD  # a clock would go on while the host sleeps
        here = _ranks_of(launchers[0]) if launchers else []
        left = left if missing else here
        missing = missing + _PERIOD if rank in here and len(here) < local_size else 0.0
        if missing > _SECONDS_TO_BE_SURE:
            absent = f"of the {local_size} ranks on {host} all but {left}"
            if local_size == size:
                absent = ", ".join(f"rank {r} on {host}" for r in range(size) if r not in left)
            text = (
                f"{absent} ended before create_communicator, in which rank {rank} on {host} "
                "waits. Any output above may say why."
            )
            _end(me, text, turn(here.index(rank)))
        elif waited > (limit or float("inf")):
            text = (
                f"rank {rank} on {host} has waited for {waited:.0f} s in create_communicator for "
                f"ranks that have not called it. Running on this host: ranks {here}, of {size}. "
                "CHAINERMN_STALL_LIMIT sets how long to wait."
            )
            _end(me, text, turn(rank))


def _ranks_of(launcher: Process) -> list[int]:
    """Return the living ranks that a launcher has started on this host."""
    children = [process.pid for process in all_processes() if process.parent == launcher.pid]
    found = [numbers_in(environment_of(child)) for child in children]
    return sorted(numbers.rank for numbers in found if numbers)


def _end(me: Process, text: str, after: float) -> None:
    time.sleep(after)
    if me.is_alive():  # no other rank was first
        print_at_once(f"chainermn: {text}\nThe whole job is being ended.")
        start_reaper(me.pid)
        me.kill()  # upon which mpiexec ends the others
