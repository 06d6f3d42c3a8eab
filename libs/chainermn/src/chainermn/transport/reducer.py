"""The sums over ranks that averaging gradients is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: An array in host memory or in GPU memory.
Array: TypeAlias = NDArray[Any]


class Pending(Protocol):
    """Something that other ranks have a part in, such as an MPI request."""

    def Test(self) -> bool:
        """Tell whether it is complete."""

    def Wait(self) -> Any:
        """Wait until it is complete."""


#: A non-blocking collective. It yields whatever it has to wait for and is resumed when that is
#: complete. It never waits itself, so one thread can carry on several in turn.
Steps: TypeAlias = Generator[Pending, None, None]


def wait_for(steps: Steps) -> None:
    """Run a non-blocking collective to its end."""
    for pending in steps:
        pending.Wait()


def shard_bounds(n: int, size: int) -> list[tuple[int, int]]:
    """Divide ``range(n)`` into ``size`` consecutive shards, whose lengths differ by at most 1."""
    return [(n * i // size, n * (i + 1) // size) for i in range(size)]


class AllReducer(ABC):
    """Non-blocking all-reduces of arrays of floats.

    Every array is one-dimensional and C-contiguous, has the same length and dtype on all ranks,
    and is changed in place. Only one thread at a time may use a reducer. It takes the memory it
    needs at the first call and keeps it.

    Parameters
    ----------
    rank : int
        Number of this process among those that take part.
    size : int
        Number of those that take part.
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
            Dtype to which the arrays are rounded before they travel, and the result once more;
            that of ``array`` by default.
        """


class Reducer(AllReducer):
    """All-reduces, and the collectives that other all-reduces are made of."""

    @abstractmethod
    def reduce(self, array: Array, divisor: int = 1) -> Steps:
        """Give rank 0 the sum of the arrays, divided; elsewhere ``array`` becomes undefined."""

    @abstractmethod
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        """Give each rank its shard of the sum of the arrays, divided.

        Returns
        -------
        ndarray
            The shard ``shard_bounds(array.size, size)[rank]``, a view of ``array``. The rest of
            ``array`` becomes undefined.
        """

    @abstractmethod
    def allgather(self, array: Array) -> Steps:
        """Give every rank the shards of all: the reverse of :meth:`reduce_scatter`."""

    @abstractmethod
    def bcast(self, array: Array) -> Steps:
        """Give every rank the array of rank 0."""
