"""Interfaces of the collectives that average gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI

    from chainermn.transport.topology import Topology

#: An array in host memory or in GPU memory.
Array: TypeAlias = NDArray[Any]
Dtype: TypeAlias = np.dtype[Any]


class Pending(Protocol):
    """An operation that completes later, such as an MPI request."""

    def Test(self) -> bool:
        """Tell whether it is complete."""

    def Wait(self) -> Any:
        """Wait until it is complete."""


#: A non-blocking collective. It yields each operation it depends on and is resumed when that
#: operation is complete. It never waits itself, so one thread can advance several in turn.
Steps: TypeAlias = Generator[Pending, None, None]


def shard_bounds(n: int, size: int) -> list[tuple[int, int]]:
    """Divide ``range(n)`` into ``size`` consecutive shards, whose lengths differ by at most 1."""
    return [(n * i // size, n * (i + 1) // size) for i in range(size)]


def padded_length(n: int, size: int) -> int:
    """Return the smallest multiple of ``size`` that is at least ``n``, to get equal shards."""
    return -(-n // size) * size


class AllReducer(ABC):
    """Performs non-blocking all-reduces of float arrays among ``size`` ranks.

    Every array is one-dimensional and C-contiguous, has the same length and dtype on all ranks,
    and is changed in place. Only one thread at a time may use a reducer. A reducer allocates
    scratch memory on its first call and keeps it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def allreduce(self, array: Array, divisor: int = 1, wire_dtype: Dtype | None = None) -> Steps:
        """Give every rank the sum of the arrays, divided by ``divisor``.

        Arrays are rounded to ``wire_dtype`` before they are sent, and so is the result. By
        default, nothing is rounded.
        """


class Reducer(AllReducer):
    """An `AllReducer` that also has the collectives from which algorithms build all-reduces."""

    def reduce(self, array: Array, divisor: int = 1) -> Steps:
        """Give rank 0 the sum of the arrays, divided; elsewhere ``array`` becomes undefined."""
        return self.allreduce(array, divisor)

    @abstractmethod
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        """Give each rank its shard of the sum of the arrays, divided.

        Returns the shard ``shard_bounds(array.size, size)[rank]``, a view of ``array``. The rest
        of ``array`` becomes undefined.
        """

    @abstractmethod
    def allgather(self, array: Array) -> Steps:
        """Give every rank the shards of all ranks: the reverse of :meth:`reduce_scatter`."""

    @abstractmethod
    def bcast(self, array: Array) -> Steps:
        """Give every rank the array of rank 0."""


class Reducers(ABC):
    """Reducers among different groups of ranks, which algorithms combine.

    Each is created on first use. That is collective, so all ranks must use the same reducers in
    the same order.
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
