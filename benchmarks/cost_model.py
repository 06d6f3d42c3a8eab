"""How long ``naive`` takes for one array, from counts of what ranks do and what one of each costs.

Messages have a cost, and so have their bytes, as in Hockney's model (Parallel Computing 20, 1994);
Thakur, Rabenseifner and Gropp (Int. J. High Perf. Comput. Appl. 19, 2005) count those of
collectives. Two things are not in these:

- Ranks that outnumber the cores take turns. Whatever a rank does takes as many times longer as
  there are ranks for each core, and one that waits for others waits for their turns.
- The link of a host works while the cores do something else, so that the slower of both decides.
  What a link carries is known. Fitted, it came out too fast: links let a short burst pass at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from benchmarks.networks import link_seconds
from chainermn.transport.host import in_turn, mpi_reducer, reducers, shared_memory

# From so many bytes on, MPICH gathers by a ring and not by doublings.
_RING = 2**19
# While a chunk is gathered, so is the next one, of those that `MpiReducer` has under way.
_GATHERED_AT_A_TIME = 2


@dataclass(frozen=True)
class Job:
    """An exchange of so many bytes, among hosts with so many ranks each. All share the cores."""

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
        """Return how many times longer a rank takes than on a core of its own."""
        return max(1.0, self.ranks / self.cores)


@dataclass(frozen=True)
class Counts:
    """What a rank does in an exchange; or, of a machine, the seconds that one of each takes.

    Attributes
    ----------
    exchanges : float
    turns : float
        Of all ranks on the cores, one after the other, until others have come.
    messages : float
    sent_bytes : float
        To ranks of other hosts, and as many received from them.
    local_bytes : float
        Copied, from other ranks of the host too, or added to others.
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
    # A rank that needs all others waits until each has had its turn; one that needs another, half
    # as long on average. First of all they agree, by an all-reduce.
    doublings = math.ceil(math.log2(ranks))
    turns, messages, sent = doublings / 2, math.log2(job.hosts), leaving_bytes(job) / job.per_host
    if takes_turns(job):
        # They agree without MPI. All add a chunk, and all read it; the next one follows at once.
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

    Each rank sends to each rank of another host. Along a ring only one of a host does.
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
    """Return the seconds for which the link of a host is busy, at 1 Gbit/s."""
    return link_seconds(leaving_bytes(job), 2)


def cores(job: Job, machine: Counts) -> float:
    """Return the seconds for which the cores are busy."""
    return job.ranks_per_core * float(np.dot(astuple(counts_of(job)), astuple(machine)))


def fit(jobs: Sequence[Job], seconds: Sequence[float]) -> Counts:
    """Return the costs that explain best what jobs have taken that no link has slowed down.

    None of them is negative, and the sum of the squares of the relative errors is least (Lawson
    and Hanson, Solving Least Squares Problems, 1974).
    """
    from scipy.optimize import nnls

    table = np.array([job.ranks_per_core * np.array(astuple(counts_of(job))) for job in jobs])
    found, _ = nnls(table / np.array(seconds)[:, None], np.ones(len(jobs)))
    return Counts(*map(float, found))


def takes_turns(job: Job) -> bool:
    """Tell whether each rank adds to the sum in its turn."""
    return job.hosts == 1 and job.ranks > reducers._RANKS_PER_CORE * job.cores


def _chunk_bytes(job: Job) -> int:
    if takes_turns(job):
        return in_turn._CHUNK_BYTES
    return shared_memory._ring(job.ranks)[1] if job.hosts == 1 else mpi_reducer._CHUNK_BYTES


def _is_ring(job: Job) -> bool:
    return min(job.n_bytes, _chunk_bytes(job)) >= _RING


def _is_small(job: Job) -> bool:
    """Tell whether whole arrays are sent to all ranks, and not shards."""
    most = mpi_reducer._SMALL_BYTES_OF_TWO if job.ranks == 2 else mpi_reducer._SMALL_BYTES
    return job.n_bytes <= most
