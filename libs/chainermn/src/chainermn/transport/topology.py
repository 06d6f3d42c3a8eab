"""Find out which ranks share a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Topology:
    """The host of every rank, and the position of this rank."""

    #: Number of each rank's host. Hosts are numbered in the order of their lowest ranks.
    nodes: tuple[int, ...]
    #: This rank.
    rank: int

    @classmethod
    def from_hosts(cls, hosts: Sequence[str], rank: int) -> Topology:
        """Return the topology of ranks on ``hosts``, which has one host name per rank."""
        numbers: dict[str, int] = {}
        nodes = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
        return cls(nodes, rank)

    @classmethod
    def of(cls, mpi_comm: MPI.Intracomm) -> Topology:
        """Return the topology of a communicator's ranks. Collective."""
        return cls.from_hosts(mpi_comm.allgather(host_name()), mpi_comm.rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def intra_rank(self) -> int:
        """Position of this rank among the ranks of its host."""
        return self.nodes[: self.rank].count(self.inter_rank)

    @property
    def intra_size(self) -> int:
        """Number of ranks on this host."""
        return self.nodes.count(self.inter_rank)

    @property
    def inter_rank(self) -> int:
        """Number of this host."""
        return self.nodes[self.rank]

    @property
    def inter_size(self) -> int:
        """Number of hosts."""
        return max(self.nodes) + 1

    @property
    def ranks_per_host(self) -> tuple[int, ...]:
        """Number of ranks on each host."""
        return tuple(self.nodes.count(node) for node in range(self.inter_size))


def host_name() -> str:
    """Return MPI's name for this host; MPI must be initialized."""
    from mpi4py import MPI

    return MPI.Get_processor_name()
