"""The reducers that algorithms combine: among all ranks, inside each host, between hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from chainermn.transport.reducer import AllReducer, Array, Reducer

if TYPE_CHECKING:
    from mpi4py import MPI

    from chainermn.transport.topology import Topology


class Reducers(ABC):
    """The reducers among different groups of ranks, each made when it is first used.

    Making one is collective, so all ranks must use the same reducers in the same order.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        Communicator of all ranks.
    topology : Topology
        Host of each rank.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        self.mpi_comm = mpi_comm
        self.topology = topology
        self._parts: list[MPI.Intracomm] = []

    @property
    @abstractmethod
    def everyone(self) -> AllReducer:
        """The reducer among all ranks."""

    @property
    @abstractmethod
    def intra(self) -> Reducer:
        """The reducer among the ranks of this host."""

    @property
    @abstractmethod
    def inter(self) -> AllReducer:
        """The reducer among the ranks that have the same position on their hosts."""

    @abstractmethod
    def pieces(self, buffer: Array) -> Iterator[Array]:
        """Divide a buffer, for an algorithm whose scratch memory is as large as its input."""

    def free(self) -> None:
        """Release the reducers and their communicators. Collective."""
        for name in ("everyone", "intra", "inter"):
            self.__dict__.pop(name, None)
        while self._parts:
            self._parts.pop().Free()

    def _split(self, color: int) -> MPI.Intracomm:
        part = cast("MPI.Intracomm", self.mpi_comm.Split(color, self.mpi_comm.rank))
        self._parts.append(part)
        return part
