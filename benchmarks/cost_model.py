"""Predict how long ``naive`` takes for one array: count operations, and multiply by their costs.

Messages have a cost, and so have their bytes, as in Hockney's model (Parallel Computing 20, 1994).
Thakur, Rabenseifner and Gropp (Int. J. High Perf. Comput. Appl. 19, 2005) count messages and bytes
of collectives. Two things are new here:

- Ranks that outnumber the cores take turns. All work of a rank takes as many times longer as
  there are ranks per core, and a rank that waits for others waits for their turns.
- The link of a host works while the cores do something else, so the slower of both decides. The
  speed of a link is known. A fit would find it too fast, because links let short bursts pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from benchmarks.networks import link_seconds
from chainermn.transport.host import in_turn, mpi_reducer, reducers, shared_memory

# From this many bytes on, MPICH gathers along a ring instead of by recursive doubling.
_RING = 2**19
# `MpiReducer` gathers a chunk while it gathers the one before.
_GATHERED_AT_A_TIME = 2


@dataclass(frozen=True)
class Job:
    """An exchange of an array between hosts that share the cores."""

    n_bytes: float
    hosts: int
    per_host: int
    cores: int

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.hosts * self.per_host

    @property
    def ranks_per_core(self) -> float:
        """Return how many times longer a rank takes than with its own core."""
        return max(1.0, self.ranks / self.cores)


@dataclass(frozen=True)
class Counts:
    """What a rank does in an exchange, or the seconds that a machine takes for one of each.

    Attributes
    ----------
    exchanges : float
    turns : float
        Turns of all ranks on the cores that the rank waits for.
    messages : float
    sent_bytes : float
        Bytes sent to ranks of other hosts. As many are received.
    local_bytes : float
        Bytes copied, also from other ranks of the host, or added.
    """

    exchanges: float = 0
    turns: float = 0
    messages: float = 0
    sent_bytes: float = 0
    local_bytes: float = 0


def counts_of(job: Job) -> Counts:
    """Count what a rank does."""
    n, ranks = job.n_bytes, job.ranks
    chunks = math.ceil(n / _chunk_bytes(job))
    others = (ranks - 1) / ranks
    # A rank that needs all others waits for a turn of each. If it needs one other, it waits half
    # as long on average. All ranks first agree by an all-reduce.
    doublings = math.ceil(math.log2(ranks))
    turns, messages, sent = doublings / 2, math.log2(job.hosts), leaving_bytes(job) / job.per_host
    if takes_turns(job):
        # They agree without MPI. All add a chunk, and all read it. The next one follows at once.
        turns = 1 + chunks + 1
        local = 2 * n
    elif job.hosts == 1:
        turns += chunks + 1
        local = (1 + 2 * others) * n
    elif _is_small(job):
        turns += doublings / 2
        messages *= 2
        local = 2 * ranks * n - sent
    else:
        steps, gathers = doublings, math.log2(job.hosts)
        if _is_ring(job):
            steps, gathers = ranks - 1, (ranks - 1) / job.per_host
        turns += chunks * (1 + steps / 2) / min(chunks, _GATHERED_AT_A_TIME)
        messages += chunks * (ranks - job.per_host + gathers)
        local = 3 * others * n - sent
    return Counts(1, turns if ranks > job.cores else 0, messages, sent, local)


def leaving_bytes(job: Job) -> float:
    """Return the bytes that leave a host.

    Each rank sends to each rank of other hosts. Along a ring, only one rank per host does.
    """
    ranks = job.ranks
    to_each = job.per_host * (ranks - job.per_host)
    if job.hosts == 1:
        return 0.0
    if _is_small(job):
        return to_each * job.n_bytes
    along = ranks - 1 if _is_ring(job) else to_each
    return (to_each + along) / ranks * job.n_bytes


def link(job: Job) -> float:
    """Return how many seconds the link of a host is busy, at 1 Gbit/s."""
    return link_seconds(leaving_bytes(job), 2)


def cores(job: Job, machine: Counts) -> float:
    """Return how many seconds the cores are busy."""
    return job.ranks_per_core * float(np.dot(astuple(counts_of(job)), astuple(machine)))


def fit(jobs: Sequence[Job], seconds: Sequence[float]) -> Counts:
    """Return the costs that best explain the times of jobs whose links have no limit.

    This is the non-negative least-squares fit of the relative errors (Lawson and Hanson, Solving
    Least Squares Problems, 1974).
    """
    from scipy.optimize import nnls

    table = np.array([job.ranks_per_core * np.array(astuple(counts_of(job))) for job in jobs])
    found, _ = nnls(table / np.array(seconds)[:, None], np.ones(len(jobs)))
    return Counts(*map(float, found))


def takes_turns(job: Job) -> bool:
    """Return whether the ranks add to the sum one after the other."""
    return job.hosts == 1 and job.ranks > reducers._RANKS_PER_CORE * job.cores


def _chunk_bytes(job: Job) -> int:
    if takes_turns(job):
        return in_turn.CHUNK_BYTES
    return shared_memory._ring(job.ranks)[1] if job.hosts == 1 else mpi_reducer.CHUNK_BYTES


def _is_ring(job: Job) -> bool:
    return min(job.n_bytes, _chunk_bytes(job)) >= _RING


def _is_small(job: Job) -> bool:
    """Return whether whole arrays are sent to all ranks instead of shards."""
    most = mpi_reducer.SMALL_BYTES_OF_TWO if job.ranks == 2 else mpi_reducer.SMALL_BYTES
    return job.n_bytes <= most
