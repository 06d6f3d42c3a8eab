"""The sums over ranks that averaging gradients is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chainermn.transport.host.sums import Adder, divide

Array: TypeAlias = NDArray[Any]


class Pending(Protocol):
    """Something that other ranks have a part in, such as an MPI request."""

    def Test(self) -> bool:
        """Tell whether it is there."""

    def Wait(self) -> Any:
        """Wait until it is there."""


#: What a collective does between its waits. It yields whatever it has to wait for, and goes on
#: when that is there; it does not wait itself, so that several can be carried on in turn.
Steps: TypeAlias = Generator[Pending, None, None]


def shard_bounds(n: int, size: int) -> list[tuple[int, int]]:
    """Divide ``range(n)`` into ``size`` consecutive parts whose lengths differ by one at most."""
    return [(n * i // size, n * (i + 1) // size) for i in range(size)]


class AllReducer(ABC):
    """All-reduces of arrays of floats, in steps.

    Every array is one-dimensional and C-contiguous, of the same length and dtype on all ranks,
    and changed in place. One thread at a time may use it. What memory it needs it takes at the
    first call and keeps.

    Parameters
    ----------
    rank, size : int
        Of this process among those that take part.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def allreduce(
        self, array: Array, divisor: int = 1, wire_dtype: np.dtype[Any] | None = None
    ) -> Steps:
        """Give every rank the sum of the arrays, divided by ``divisor``.

        Parameters
        ----------
        array : ndarray of shape (n,)
        divisor : int
        wire_dtype : dtype, optional
            To which the arrays are rounded before they travel, and the result once more; that of
            ``array`` by default.
        """


class Reducer(AllReducer):
    """Beside all-reduces, what they can be made of."""

    @abstractmethod
    def reduce(self, array: Array, divisor: int = 1) -> Steps:
        """Give rank 0 the sum of the arrays, divided; elsewhere ``array`` becomes undefined."""

    @abstractmethod
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        """Give each rank its shard of the sum of the arrays, divided.

        Returns
        -------
        ndarray
            The shard ``shard_bounds(array.size, size)[rank]``: a view of ``array``. The rest of
            ``array`` becomes undefined.
        """

    @abstractmethod
    def allgather(self, array: Array) -> Steps:
        """Give every rank the shards of all: the reverse of :meth:`reduce_scatter`."""

    @abstractmethod
    def bcast(self, array: Array) -> Steps:
        """Give every rank the array of rank 0."""


class HostReducer(Reducer):
    """Collectives on arrays in host memory.

    Each rank adds up a shard of the elements, in the order of the ranks and in float32 where they
    have 16 bits: all ranks get the same bits, however the elements were divided into arrays. This
    is the reduce-scatter and all-gather of Thakur, Rabenseifner and Gropp, "Optimization of
    collective communication operations in MPICH", Int. J. High Performance Computing Applications
    19(1), 2005, with the pairwise exchange of shards, which rounds only once to the dtype that
    travels.

    Attributes
    ----------
    adder : Adder
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.adder = Adder()


class SingleReducer(HostReducer):
    """For a single rank: nothing travels."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allreduce(
        self, array: Array, divisor: int = 1, wire_dtype: np.dtype[Any] | None = None
    ) -> Steps:
        """Divide ``array``; there is nothing to round, as nothing travels."""
        divide(array, divisor)
        yield from ()

    def reduce(self, array: Array, divisor: int = 1) -> Steps:
        """Divide ``array``."""
        return self.allreduce(array, divisor)

    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        """Divide ``array`` and return it."""
        yield from self.allreduce(array, divisor)
        return array

    def allgather(self, array: Array) -> Steps:
        """Do nothing."""
        yield from ()

    def bcast(self, array: Array) -> Steps:
        """Do nothing."""
        yield from ()
