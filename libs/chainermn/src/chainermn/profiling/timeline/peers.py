"""Communicate among the ranks whose spans are combined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chainermn.failures.activity import Group, MarkedCall
from chainermn.profiling.timeline import clocks
from chainermn.profiling.timeline.clocks import Offset
from chainermn.transport.duplicates import Duplicate
from chainermn.transport.topology import host_name

if TYPE_CHECKING:
    from mpi4py import MPI


class Peers:
    """Calls among the ranks of a communicator, on a duplicate. Creating one is collective."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._group = Group(mpi_comm)
        with self.waiting("a timeline"):
            self._duplicate = Duplicate(mpi_comm, lambda own: own, free=None)
            self.hosts: list[str] = self._duplicate.made.allgather(host_name())
        self.rank = mpi_comm.rank

    def waiting(self, operation: str) -> MarkedCall:
        """Mark collective calls for the watch."""
        return MarkedCall(self._group.stream, operation, self._group.members)

    def offset(self) -> Offset:
        """Compare this host's clock with the first one's. Collective."""
        return clocks.measure(self._duplicate.made, self.hosts)

    def gather(self, own: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, and None elsewhere. Collective."""
        return self._duplicate.made.gather(own)

    def meet(self) -> None:
        """Wait for all ranks. Collective."""
        self._duplicate.made.barrier()

    def leave(self) -> None:
        """Stop making calls. Not collective."""
        self._duplicate.give_back()
