"""Divide the cores of a host among its ranks."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chainermn.notes import note_once
from chainermn.process import THREAD_VARIABLES

if TYPE_CHECKING:
    from mpi4py import MPI


def divide_cores(mpi_comm: MPI.Intracomm, host: int) -> None:
    """Limit the threads of NumPy's BLAS and of OpenMP to this rank's share of cores. Collective.

    Without this, each rank starts a thread for every core of its host, and the ranks slow each
    other down. OpenMP, whose threads oneDNN uses, is limited in the calling thread. Ranks that MPI
    has bound to separate cores keep all of them. Setting any of `THREAD_VARIABLES` turns this off.
    If a host has more ranks than cores, rank 0 prints a note. ``host`` is the number of this
    rank's host.
    """
    cores = _usable_cores()
    peers = mpi_comm.allgather((host, socket.gethostname(), cores))
    if mpi_comm.rank == 0 and (note := _crowded(peers)):
        note_once(note)
    if mpi_comm.size == 1 or any(variable in os.environ for variable in THREAD_VARIABLES):
        return
    import threadpoolctl  # takes a while, and is often not needed

    sharers = Counter(core for node, _, theirs in peers if node == host for core in theirs)
    share = sum(1 / sharers[core] for core in cores)
    threadpoolctl.threadpool_limits(max(1, int(share + 1e-6)))


def _crowded(peers: Sequence[tuple[int, str, frozenset[int]]]) -> str:
    """Return a note on hosts with more ranks than cores; empty if there are none.

    For each rank, ``peers`` has the number and name of its host, and the cores it may use.
    """
    found = []
    for node in dict.fromkeys(node for node, _, _ in peers):
        here = [(host, cores) for number, host, cores in peers if number == node]
        n_cores = len(frozenset().union(*(cores for _, cores in here)))
        if len(here) > n_cores:
            found.append((here[0][0], len(here), n_cores))
    if not found:
        return ""
    host, n_ranks, n_cores = found[0]
    n_more = len(found) - 1
    more = f", and likewise on {n_more} other host{'s' * (n_more > 1)}" if n_more else ""
    cores = "1 core" if n_cores == 1 else f"{n_cores} cores"
    return (
        f"{n_ranks} ranks share {cores} on {host}{more}: they take turns. "
        f"Start at most {n_cores} there for speed."
    )


def cores_of_job() -> int:
    """Return the number of cores here that the job may use, even if MPI has bound this rank.

    MPI binds the processes that it starts, but not their parent, which starts them.
    """
    return max(len(_usable_cores()), len(_usable_cores(os.getppid())))


def _usable_cores(pid: int = 0) -> frozenset[int]:
    """Return the cores that a process may use, by default this one."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # not Linux, or it has ended
        return frozenset(range(os.cpu_count() or 1))
