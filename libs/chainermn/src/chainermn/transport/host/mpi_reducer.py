"""Reduce over ranks by MPI."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from chainermn.transport.host.arithmetic import Adder
from chainermn.transport.host.mpi import load_mpi
from chainermn.transport.reducer import Array, Dtype, Pending, Reducer, Steps, shard_bounds

if TYPE_CHECKING:
    from mpi4py import MPI

#: Bytes of an array that are sent at a time, so that one chunk is in transit while another is cast
#: and summed.
CHUNK_BYTES = 1 << 20
_CHUNKS_UNDER_WAY = 3
#: Up to this many bytes, sending whole arrays to all ranks takes less time than sending shards
#: twice in a row. With two ranks, both ways send the same number of bytes.
SMALL_BYTES, SMALL_BYTES_OF_TWO = 1 << 13, CHUNK_BYTES


class MpiReducer(Reducer):
    """Reduces over the ranks of an MPI communicator with MPI's non-blocking collectives.

    Uses up to 7 MiB of scratch memory; :meth:`reduce_scatter` uses as much as the array.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, adder: Adder) -> None:
        super().__init__(mpi_comm.rank, mpi_comm.size)
        self._mpi_comm = mpi_comm
        self.adder = adder
        self._in_place = load_mpi().IN_PLACE
        self._chunks = [_Chunk(self) for _ in range(_CHUNKS_UNDER_WAY)]

    @override
    def allreduce(self, array: Array, divisor: int = 1, wire_dtype: Dtype | None = None) -> Steps:
        wire_dtype = wire_dtype or array.dtype
        length = CHUNK_BYTES // wire_dtype.itemsize
        n_chunks = -(-array.size // length)
        small = SMALL_BYTES_OF_TWO if self.size == 2 else SMALL_BYTES
        if array.size * wire_dtype.itemsize <= small:
            yield from self._chunks[0].allgather_and_add(array, divisor, wire_dtype)
            return
        for step in range(n_chunks + 2):
            if step < n_chunks:
                part = array[step * length : (step + 1) * length]
                self._chunks[step % _CHUNKS_UNDER_WAY].scatter(part, wire_dtype)
            if 1 <= step <= n_chunks:
                yield from self._chunks[(step - 1) % _CHUNKS_UNDER_WAY].add_up(divisor)
            if step >= 2:
                yield from self._chunks[(step - 2) % _CHUNKS_UNDER_WAY].finish()

    @override
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        chunk = self._chunks[0]
        chunk.scatter(array, array.dtype)
        return (yield from chunk.sum_of_shard(divisor))

    @override
    def allgather(self, array: Array) -> Steps:
        yield self.iallgather(array)

    @override
    def bcast(self, array: Array) -> Steps:
        yield self._mpi_comm.Ibcast(array.view(np.uint8))

    def iallgather(self, array: Array) -> MPI.Request:
        """Start giving every rank the shards of all ranks."""
        counts, offsets = self._layout(array)
        return self._mpi_comm.Iallgatherv(
            self._in_place, [array.view(np.uint8), (counts, offsets)]
        )

    def ialltoall(self, array: Array, received: Array) -> MPI.Request:
        """Start sending each other rank its shard of ``array``.

        Row ``k`` of ``received`` gets the shard that rank ``k`` sends to this rank. This rank's
        row stays as it is.
        """
        given, offsets = self._layout(array)
        own = received.shape[1] * array.itemsize
        taken = [own] * self.size
        given[self.rank] = taken[self.rank] = 0
        rows = [own * rank for rank in range(self.size)]
        return self._mpi_comm.Ialltoallv(
            [array.view(np.uint8), (given, offsets)],
            [received.reshape(-1).view(np.uint8), (taken, rows)],
        )

    def _layout(self, array: Array) -> tuple[list[int], list[int]]:
        """Return the sizes and offsets of all shards in bytes."""
        bounds = shard_bounds(array.size, self.size)
        counts = [(end - begin) * array.itemsize for begin, end in bounds]
        return counts, [begin * array.itemsize for begin, _ in bounds]


class _Chunk:
    """Consecutive elements that are sent together, with their scratch memory."""

    def __init__(self, reducer: MpiReducer) -> None:
        self._reducer = reducer
        self._memory: dict[str, Array] = {}

    def scatter(self, array: Array, wire_dtype: Dtype) -> None:
        """Start sending each rank its shard of ``array``, rounded to ``wire_dtype``."""
        reducer = self._reducer
        begin, end = shard_bounds(array.size, reducer.size)[reducer.rank]
        self._array = self._wire = array
        if array.dtype != wire_dtype:
            self._wire = self._scratch("wire", array.size, wire_dtype)
            reducer.adder.copy(array, self._wire)
        self._own = self._wire[begin:end]
        received = self._scratch("received", self._own.size * reducer.size, wire_dtype)
        self._received = received.reshape(reducer.size, -1)
        self._request = reducer.ialltoall(self._wire, self._received)

    def sum_of_shard(self, divisor: int) -> Generator[Pending, None, Array]:
        """Sum this rank's shard in place."""
        yield self._request
        reducer = self._reducer
        parts = list(self._received)
        parts[reducer.rank] = self._own
        total = self._own if reducer.rank < 2 else parts[0]
        reducer.adder.add_up(parts, total, divisor)
        if total is not self._own:
            self._own[:] = total
        return self._own

    def add_up(self, divisor: int) -> Steps:
        """Sum this rank's shard and start sending it to the others."""
        yield from self.sum_of_shard(divisor)
        self._request = self._reducer.iallgather(self._wire)

    def finish(self) -> Steps:
        """Receive the shards of all ranks into the array."""
        yield self._request
        if self._wire is not self._array:
            self._reducer.adder.copy(self._wire, self._array)

    def allgather_and_add(self, array: Array, divisor: int, wire_dtype: Dtype) -> Steps:
        """Send whole arrays to all ranks, each of which sums all of them."""
        reducer = self._reducer
        everywhere = self._scratch("received", reducer.size * array.size, wire_dtype)
        parts = list(everywhere.reshape(reducer.size, -1))
        reducer.adder.copy(array, parts[reducer.rank])
        yield reducer.iallgather(everywhere)
        reducer.adder.add_up(parts, parts[0], divisor)
        reducer.adder.copy(parts[0], array)

    def _scratch(self, name: str, n: int, dtype: Dtype) -> Array:
        n_bytes = n * dtype.itemsize
        if name not in self._memory or self._memory[name].size < n_bytes:
            self._memory[name] = np.empty(n_bytes, np.uint8)
        return self._memory[name][:n_bytes].view(dtype)
