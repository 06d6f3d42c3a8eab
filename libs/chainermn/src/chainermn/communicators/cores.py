"""Divide the cores of a host among its ranks."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

import threadpoolctl

from chainermn.communicators.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

#: A user who sets one of these has decided about threads.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)


def divide_cores(mpi_comm: MPI.Intracomm, topology: Topology) -> None:
    """Limit the threads of NumPy's BLAS to this rank's share of the cores of its host.

    Each BLAS otherwise starts a thread for every core, and the ranks of a host get in each
    other's way. Ranks that MPI has bound to cores of their own keep those. Nothing happens
    where one of `THREAD_VARIABLES` is set.
    """
    cores = _usable_cores()
    peers = mpi_comm.allgather((topology.inter_rank, cores))
    if topology.size == 1 or any(variable in os.environ for variable in THREAD_VARIABLES):
        return
    sharers = Counter(
        core for node, theirs in peers if node == topology.inter_rank for core in theirs
    )
    share = sum(1 / sharers[core] for core in cores)
    threadpoolctl.threadpool_limits(max(1, int(share + 1e-6)), user_api="blas")


def _usable_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
