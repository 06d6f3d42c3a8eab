"""Base class of reducers through memory that the ranks of a host share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator

from typing_extensions import override

from chainermn.transport.reducer import Array, Dtype, Pending, Reducer, Steps, shard_bounds

#: Words that others wait for get a cache line of their own, and the adjacent line, which
#: processors prefetch with it.
LINE_BYTES = 128


class SharingReducer(Reducer):
    """A reducer over ranks of one host. Subclasses define how it sums and distributes.

    Data never leaves the host, so it is not rounded to a wire dtype.
    """

    @override
    def allreduce(self, array: Array, divisor: int = 1, wire_dtype: Dtype | None = None) -> Steps:
        return self._sum(array, divisor, 0, array.size)

    @override
    def reduce(self, array: Array, divisor: int = 1) -> Steps:
        return self._sum(array, divisor, 0, array.size if self.rank == 0 else 0)

    @override
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        begin, end = shard_bounds(array.size, self.size)[self.rank]
        yield from self._sum(array, divisor, begin, end)
        return array[begin:end]

    @override
    def allgather(self, array: Array) -> Steps:
        return self._distribute(array, *shard_bounds(array.size, self.size)[self.rank])

    @override
    def bcast(self, array: Array) -> Steps:
        return self._distribute(array, 0, array.size if self.rank == 0 else 0)

    @abstractmethod
    def _sum(self, array: Array, divisor: int, begin: int, end: int) -> Steps:
        """Replace ``array[begin:end]`` with the sum, divided by ``divisor``."""

    @abstractmethod
    def _distribute(self, array: Array, begin: int, end: int) -> Steps:
        """Give ``array[begin:end]`` to the other ranks, and fill the rest with theirs."""
