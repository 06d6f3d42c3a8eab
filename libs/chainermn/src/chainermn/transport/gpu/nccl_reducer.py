"""Reduction over ranks by NCCL."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from typing_extensions import override

from chainermn.transport.gpu.nccl import NcclTransport
from chainermn.transport.reducer import Array, Pending, Reducer, Steps


class NcclReducer(Reducer):
    """Reduces arrays in GPU memory, on the current stream.

    The host never waits: a collective is over for it once its work is enqueued. NCCL rounds after
    each addition, so 16-bit sums are less exact than those of the reducers in host memory, and may
    overflow where the mean would not.

    Parameters
    ----------
    transport : NcclTransport
    """

    def __init__(self, transport: NcclTransport) -> None:
        super().__init__(transport.rank, transport.size)
        self._transport = transport

    @override
    def allreduce(
        self, array: Array, divisor: int = 1, wire_dtype: np.dtype[Any] | None = None
    ) -> Steps:
        is_rounded = wire_dtype is not None and wire_dtype != array.dtype
        wire = array.astype(wire_dtype) if is_rounded else array
        self._transport.combine(wire)
        if wire is not array:
            array[...] = wire.astype(array.dtype)
        _divide(array, divisor)
        yield from ()

    @override
    def reduce(self, array: Array, divisor: int = 1) -> Steps:
        self._transport.reduce(array)
        _divide(array, divisor)
        yield from ()

    @override
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        shard = self._transport.reduce_scatter(array)
        _divide(shard, divisor)
        yield from ()
        return shard

    @override
    def allgather(self, array: Array) -> Steps:
        self._transport.allgather(array)
        yield from ()

    @override
    def bcast(self, array: Array) -> Steps:
        self._transport.bcast(array)
        yield from ()


def _divide(array: Array, divisor: int) -> None:
    if divisor > 1:
        array /= divisor
