"""Process beside each starting rank that ends the job if other ranks never start.

mpi4py initialises MPI without releasing the GIL, so no thread of the rank can do this. When a rank
exits before it initialises MPI, MPICH's ``mpiexec`` lets the others wait forever (5.0.2, whatever
the exit code); Open MPI's ends the job (5.0.11). When a rank never gets there, both wait.
"""

from __future__ import annotations

import os
import socket
import time

from chainermn.failures.ending import print_at_once, start_reaper
from chainermn.failures.processes import (
    RANK_VARIABLES,
    all_processes,
    environment_of,
    find,
    launchers_of,
)

_PERIOD = 0.25
# mpiexec may still be starting ranks, or be about to end the job by itself.
_SECONDS_TO_BE_SURE = 1.5
# Every rank of a host notices that one is gone: they speak in turn, until one has ended the job.
_SECONDS_FOR_EACH = 0.3


def main(pid: int, limit: float) -> None:
    """Run a guard, in the process that `starting` starts and kills."""
    Guard(pid, limit).run()


class Guard:
    """Watches one rank start.

    Parameters
    ----------
    pid : int
        Process of the rank, whose environment this process has inherited.
    limit : float
        Seconds that the start may take; 0 for no limit.
    """

    def __init__(self, pid: int, limit: float) -> None:
        self._me = find(pid)
        self._limit = limit or float("inf")
        names = next(names for names in RANK_VARIABLES if names[0] in os.environ)
        self._variable = names[0]
        self._rank, self._size, self._local_size = (int(os.environ.get(n, "0")) for n in names)
        self._launchers = launchers_of(pid)
        self._name = f"rank {self._rank} on {socket.gethostname()}"

    def run(self) -> None:
        """Watch, and end the job if necessary."""
        waited = missing = 0.0
        left: list[int] = []  # before others are ended because of the first
        while self._is_needed():
            time.sleep(_PERIOD)
            waited += _PERIOD  # a clock would go on while the host sleeps
            here = self._ranks_here()
            is_missing = self._rank in here and len(here) < self._local_size
            left = left if missing else here
            missing = missing + _PERIOD if is_missing else 0.0
            if missing > _SECONDS_TO_BE_SURE:
                self._end(
                    f"{self._absent(left)} ended before create_communicator, in which "
                    f"{self._name} waits. Any output above may say why.",
                    here.index(self._rank) * _SECONDS_FOR_EACH,
                )
            elif waited > self._limit:
                self._end(
                    f"{self._name} has waited for {waited:.0f} s in create_communicator for ranks "
                    f"that have not called it. Running on this host: ranks {here}, of "
                    f"{self._size}. CHAINERMN_STALL_LIMIT sets how long to wait.",
                    min(self._rank, 10) * _SECONDS_FOR_EACH,
                )

    def _is_needed(self) -> bool:
        return self._me is not None and self._me.is_alive()

    def _ranks_here(self) -> list[int]:
        """Return the living ranks that the same launcher has started."""
        if not self._launchers:
            return []
        parent = self._launchers[0].pid
        children = [process.pid for process in all_processes() if process.parent == parent]
        ranks = (environment_of(child).get(self._variable, "") for child in children)
        return sorted(int(rank) for rank in ranks if rank)

    def _absent(self, here: list[int]) -> str:
        host = socket.gethostname()
        if self._local_size == self._size:
            gone = sorted(set(range(self._size)) - set(here))
            return ", ".join(f"rank {rank} on {host}" for rank in gone)
        return f"of the {self._local_size} ranks on {host} all but {here}"

    def _end(self, text: str, after: float) -> None:
        time.sleep(after)
        if not self._is_needed():
            return
        assert self._me is not None
        print_at_once(f"chainermn: {text}\nThe whole job is being ended.")
        start_reaper(self._me.pid)
        self._me.kill()  # upon which mpiexec ends the others
