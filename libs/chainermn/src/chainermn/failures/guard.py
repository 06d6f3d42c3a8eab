"""The process beside each rank that is starting: it ends the job if other ranks never come."""

from __future__ import annotations

import os
import socket
import time

from chainermn.failures.processes import (
    RANK_VARIABLES,
    all_processes,
    environment_of,
    family_of,
    find,
    launchers_of,
)

_PERIOD = 0.25
# mpiexec may still be starting ranks, or be about to end the job by itself.
_SECONDS_TO_BE_SURE = 1.5
_SECONDS_FOR_MPIEXEC = 5.0
# Every rank of a host notices that another one is gone: they say so in turn, until all are ended.
_SECONDS_FOR_EACH = 0.3


def main(pid: int, limit: float) -> None:
    """Run a guard: what `starting` has started comes here, and is killed by it."""
    Guard(pid, limit).run()


class Guard:
    """Watches over the start of one rank.

    Parameters
    ----------
    pid : int
        Of the rank, whose environment this process has inherited.
    limit : float
        Seconds that the start may take; 0: any time.
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
        """Watch, and end the job if need be."""
        waited = missing = 0.0
        left: list[int] = []  # before the first to end were followed by those ended for that
        while self._is_needed():
            time.sleep(_PERIOD)
            waited += _PERIOD  # no clock: it would go on while the host sleeps
            here = self._ranks_here()
            is_missing = self._rank in here and len(here) < self._local_size
            left = left if missing else here
            missing = missing + _PERIOD if is_missing else 0.0
            if missing > _SECONDS_TO_BE_SURE:
                self._end(
                    f"{self._absent(left)} ended before create_communicator, in which "
                    f"{self._name} waits. What was printed before may say why.",
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
        """Return the ranks that the same launcher has started and that are alive."""
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
        message = f"chainermn: {text}\nThe whole job is being ended.\n"
        os.write(2, message.encode(errors="replace"))
        # mpiexec would wait for this process, if that kept the standard error of the rank.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        family = family_of(self._launchers[-1].pid) if self._launchers else []
        assert self._me is not None
        self._me.kill()
        deadline = time.monotonic() + _SECONDS_FOR_MPIEXEC
        # Not for guards, which would wait for each other.
        while family := [p for p in family if not p.is_helper and p.is_alive()]:
            if time.monotonic() > deadline:
                for process in reversed(family):
                    process.kill()
            time.sleep(0.1)
