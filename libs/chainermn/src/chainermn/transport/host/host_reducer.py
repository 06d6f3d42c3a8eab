"""The base class of reducers in host memory, and the reducer of a single rank."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from typing_extensions import override

from chainermn.transport.host.sums import Adder, divide
from chainermn.transport.reducer import Array, Pending, Reducer, Steps


class HostReducer(Reducer):
    """Collectives on arrays in host memory.

    Each rank sums one shard of the elements, in the order of the ranks; 16-bit elements are
    summed in float32. So all ranks get the same bits, however the elements are divided into
    arrays. This is the reduce-scatter and all-gather of Thakur, Rabenseifner and Gropp,
    "Optimization of collective communication operations in MPICH", Int. J. High Performance
    Computing Applications 19(1), 2005, except that shards are sent directly to the rank that
    sums them, so that each sum is rounded to the wire dtype only once.

    Attributes
    ----------
    adder : Adder
        Object that sums and casts arrays, and records overflows.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.adder = Adder()


class SingleReducer(HostReducer):
    """The reducer of a single rank. Nothing is sent, so nothing is rounded."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    @override
    def allreduce(
        self, array: Array, divisor: int = 1, wire_dtype: np.dtype[Any] | None = None
    ) -> Steps:
        divide(array, divisor)
        yield from ()

    @override
    def reduce(self, array: Array, divisor: int = 1) -> Steps:
        return self.allreduce(array, divisor)

    @override
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        yield from self.allreduce(array, divisor)
        return array

    @override
    def allgather(self, array: Array) -> Steps:
        yield from ()

    @override
    def bcast(self, array: Array) -> Steps:
        yield from ()
