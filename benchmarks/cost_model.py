"""How long an iteration takes, as a function of ranks, hosts, bytes, latency and bandwidth.

Every algorithm is a few counts: messages and bytes on the slowest path, over the links between
hosts and inside a host, and bytes that are added, copied and cast. A machine is what one of each
costs. A message of n bytes takes alpha + n beta seconds, and each byte of a sum gamma: Hockney's
model (Parallel Computing 20, 1994), with which Thakur, Rabenseifner and Gropp (Int. J. High Perf.
Comput. Appl. 19, 2005) describe collectives. In exchanges on two levels, inside hosts and between
them (Goyal et al., arXiv:1706.02677, section 4), each host has one link that its ranks share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

#: As in `chainermn.transport`: up to so many bytes go to everybody at once; longer
#: arrays travel in chunks of so many bytes, by MPI and by shared memory.
SMALL = 2**13
CHUNK = 2**20
#: Buckets of an exchange that overlaps with backward.
BUCKET = 2 * 2**20


@dataclass(frozen=True)
class Counts:
    """What an exchange consists of, on its slowest path.

    Attributes
    ----------
    link_messages, link_bytes : float
        Over the link of a host, all its ranks together.
    host_messages, host_bytes : float
        Between ranks of a host.
    added_bytes, copied_bytes, cast_bytes : float
        By a rank.
    """

    link_messages: float = 0
    link_bytes: float = 0
    host_messages: float = 0
    host_bytes: float = 0
    added_bytes: float = 0
    copied_bytes: float = 0
    cast_bytes: float = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(self.as_array() + other.as_array()))

    def as_array(self) -> np.ndarray:
        return np.array([getattr(self, field.name) for field in fields(self)], float)

    def seconds(self, machine: Counts) -> float:
        """Return the time on a machine, described by the seconds that one of each takes."""
        return float(self.as_array() @ machine.as_array())


@dataclass(frozen=True)
class Job:
    """Who exchanges what.

    Attributes
    ----------
    hosts, per_host : int
        Ranks are placed on one host after the other.
    tensors : tuple of float
        Bytes of each parameter's gradient.
    """

    hosts: int
    per_host: int
    tensors: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def n_bytes(self) -> float:
        return sum(self.tensors)


def share(n: int) -> float:
    """Return (n - 1) / n: of its data, what a rank has to send, and what it has to add."""
    return (n - 1) / n


def allreduce(n_bytes: float, hosts: int, per_host: int) -> Counts:
    """Count an all-reduce among all ranks, by MPI's messages.

    Short: everything to everybody, (N-1) (alpha + n beta + n gamma). Long: a reduce-scatter by
    pairwise exchange, (N-1) alpha + (N-1)/N n beta + (N-1)/N n gamma (Thakur et al., section 4.3),
    and an all-gather by a ring, (N-1) alpha + (N-1)/N n beta (section 4.1), for each chunk. All
    ranks of a host send their shards to other hosts over its one link; of the ring only one does.
    """
    ranks = hosts * per_host
    outside, inside = ranks - per_host, per_host - 1
    if n_bytes <= SMALL:
        return Counts(
            link_messages=outside,
            link_bytes=per_host * outside * n_bytes,
            host_messages=inside,
            host_bytes=inside * n_bytes,
            added_bytes=(ranks - 1) * n_bytes,
        )
    chunks = math.ceil(n_bytes / CHUNK)
    ring = share(ranks) * n_bytes if hosts > 1 else 0
    return Counts(
        link_messages=2 * outside * chunks,
        link_bytes=per_host * share(hosts) * n_bytes + ring,
        host_messages=2 * inside * chunks,
        host_bytes=2 * inside / ranks * n_bytes,
        added_bytes=share(ranks) * n_bytes,
    )


def inside_host(n_bytes: float, ranks: int, copies: float) -> Counts:
    """Count a sum of the ranks of a host, by shared memory, in chunks that stay in the cache.

    Each rank writes, adds up its shard of all ranks' and reads what it is to have.
    """
    if ranks == 1:
        return Counts()
    return Counts(
        host_messages=2 * math.ceil(n_bytes / CHUNK),
        added_bytes=share(ranks) * n_bytes,
        copied_bytes=copies * n_bytes,
    )


def everyone(n_bytes: float, job: Job) -> Counts:
    """Count an all-reduce among all ranks: by shared memory if they are on one host."""
    if job.hosts == 1:
        return inside_host(n_bytes, job.per_host, copies=2)
    return allreduce(n_bytes, job.hosts, job.per_host)


def naive(job: Job) -> Counts:
    """Count one all-reduce for each parameter, in place."""
    return sum((everyone(n, job) for n in job.tensors), Counts())


def flat(job: Job) -> Counts:
    """Count one all-reduce of everything, gathered before and handed back afterwards."""
    return everyone(job.n_bytes, job) + gathering(job)


def hierarchical(job: Job) -> Counts:
    """Count a sum inside hosts, an all-reduce between their first ranks, a broadcast inside."""
    if job.hosts == 1:
        return flat(job)
    inside = inside_host(job.n_bytes, job.per_host, copies=4)
    return inside + allreduce(job.n_bytes, job.hosts, 1) + gathering(job)


def two_dimensional(job: Job) -> Counts:
    """Count a reduce-scatter inside hosts, an all-reduce of each shard between, an all-gather.

    The all-reduces of the shards share the link of a host, which so carries no more bytes than
    that of ``hierarchical``.
    """
    if job.hosts == 1:
        return flat(job)
    p = job.per_host
    inside = inside_host(job.n_bytes, p, copies=2 + 1 / p)
    between = allreduce(job.n_bytes / p, job.hosts, 1)
    shared = replace(between, link_bytes=p * between.link_bytes)
    return inside + shared + gathering(job)


def gathering(job: Job) -> Counts:
    """Count that gradients are copied into one buffer and back."""
    return Counts(copied_bytes=2 * job.n_bytes)


def half(exchange: Callable[[Job], Counts], job: Job) -> Counts:
    """Count an exchange in float16: half of the bytes, each cast there and back."""
    halved = Job(job.hosts, job.per_host, tuple(n / 2 for n in job.tensors))
    return exchange(halved) + Counts(cast_bytes=2 * job.n_bytes)


ALGORITHMS: Mapping[str, Callable[[Job], Counts]] = {
    "naive": naive,
    "flat": flat,
    "hierarchical": hierarchical,
    "two_dimensional": two_dimensional,
}


@dataclass(frozen=True)
class Compute:
    """Seconds of a rank's own work in an iteration."""

    forward: float
    backward: float
    step: float = 0


def plain(compute: Compute, exchange: float) -> float:
    """Return the seconds of an iteration in which the exchange comes after backward."""
    return compute.forward + compute.backward + exchange + compute.step


def overlapped(compute: Compute, exchange: float, last: float = 0) -> float:
    """Return them if the exchange goes on during backward (Sergeev and Del Balso, 2018; Li et
    al., VLDB 13, 2020), but for ``last``: the bucket that is ready only when backward ends.
    """
    hidden = max(compute.backward, exchange - last)
    return compute.forward + hidden + last + compute.step


def double_buffered(compute: Compute, exchange: float) -> float:
    """Return them if gradients are exchanged during the next iteration."""
    return max(compute.forward + compute.backward, exchange) + compute.step


def fit(counts: Sequence[Counts], seconds: Sequence[float], known: Counts) -> Counts:
    """Return the costs by which a machine's times are met best.

    Parameters
    ----------
    counts : sequence of Counts
        Of what has been measured.
    seconds : sequence of float
        How long it took.
    known : Counts
        Costs that have been measured by themselves; those that are zero are to be found.

    Returns
    -------
    Counts
        None of them negative; the sum of the squares of the relative errors is least (Lawson and
        Hanson, Solving Least Squares Problems, 1974).
    """
    from scipy.optimize import nnls

    given = known.as_array()
    table, times = np.array([c.as_array() for c in counts]), np.asarray(seconds)
    left = times - table @ given
    free = (given == 0) & table.any(axis=0)
    found, _ = nnls(table[:, free] / times[:, None], left / times)
    given[free] = found
    return Counts(*given)
