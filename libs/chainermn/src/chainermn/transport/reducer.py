"""The collectives that average gradients: sums over ranks, shards of them, broadcasts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: An array in host memory or in GPU memory.
Array: TypeAlias = NDArray[Any]


class Pending(Protocol):
    """An operation that completes later, such as an MPI request."""

    def Test(self) -> bool:
        """Tell whether it is complete."""

    def Wait(self) -> Any:
        """Wait until it is complete."""


#: A non-blocking collective. It yields each operation it depends on and is resumed when that
#: operation is complete. It never waits itself, so one thread can advance several in turn.
Steps: TypeAlias = Generator[Pending, None, None]


def wait_for(steps: Steps) -> None:
    """Run a non-blocking collective until it is complete."""
    for pending in steps:
        pending.Wait()


def shard_bounds(n: int, size: int) -> list[tuple[int, int]]:
    """Divide ``range(n)`` into ``size`` consecutive shards, whose lengths differ by at most 1."""
    return [(n * i // size, n * (i + 1) // size) for i in range(size)]


class AllReducer(ABC):
    """Non-blocking all-reduces of arrays of floats.

    Every array is one-dimensional and C-contiguous, has the same length and dtype on all ranks,
    and is changed in place. Only one thread at a time may use a reducer. A reducer allocates
    scratch memory on its first call and keeps it.

    Parameters
    ----------
    rank : int
        Rank of this process among the participants.
    size : int
        Number of participants.
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
            Dtype to which the arrays are rounded before they are sent, and the result once more;
            by default the dtype of ``array``.
        """


class Reducer(AllReducer):
    """All-reduces, and the collectives from which algorithms build other all-reduces."""

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
        """Give every rank the shards of all ranks: the reverse of :meth:`reduce_scatter`."""

    @abstractmethod
    def bcast(self, array: Array) -> Steps:
        """Give every rank the array of rank 0."""
