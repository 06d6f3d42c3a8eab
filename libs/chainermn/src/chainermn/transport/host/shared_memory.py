"""Reduce over the ranks of one host, each of which sums a shard in shared memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from typing_extensions import override

from chainermn.process.cores import cores_of_job
from chainermn.transport.host import barrier
from chainermn.transport.host.arithmetic import Adder, division
from chainermn.transport.host.barrier import Barrier
from chainermn.transport.host.sharing import SharingReducer
from chainermn.transport.reducer import Array, Dtype, Steps

if TYPE_CHECKING:
    from mpi4py import MPI

# A ring of slots, three of which are in use at a time, each with a chunk of every rank. By the
# time a slot is reused, the other cores have evicted it from their caches; with fewer slots,
# writing took four times as long.
_N_SLOTS, _LEAST_SLOTS = 8, 3
#: Most bytes of a chunk: enough to outweigh Python's overhead, and few enough for the cache.
CHUNK_BYTES, _LEAST_CHUNK_BYTES = 1 << 20, 1 << 18
# Docker gives a container 64 MiB, which all communicators and MPI share.
_MOST_BYTES = 1 << 24

_MOST_LAYOUTS = 512


def _ring(size: int) -> tuple[int, int]:
    """Return the number of slots and the bytes per chunk for ``size`` ranks.

    With many ranks, chunks are smaller than ideal, because all of them must fit in `_MOST_BYTES`.
    """
    each = _MOST_BYTES // _chunks_in_slot(size)
    chunk = min(CHUNK_BYTES, max(each // _N_SLOTS, _LEAST_CHUNK_BYTES), each // _LEAST_SLOTS)
    chunk = max(chunk, 16 * size) // 128 * 128
    return max(_LEAST_SLOTS, min(_N_SLOTS, each // chunk)), chunk


def _chunks_in_slot(size: int) -> int:
    """Return the number of chunks that a slot holds: one for each rank, and one for sums."""
    return size + 1 if size > 2 else 2


def bytes_needed(size: int) -> int:
    """Return the size of the memory that ``size`` ranks share: a little over 16 MiB."""
    n_slots, chunk = _ring(size)
    return barrier.bytes_needed(size) + n_slots * _chunks_in_slot(size) * chunk


class SharedMemoryReducer(SharingReducer):
    """Reduces over ranks of one host, chunk by chunk.

    In each step, a rank copies one chunk into shared memory, sums its shard of the previous chunk,
    and copies the sums of the chunk before that back into its array. Then all ranks meet at a
    barrier.

    Needs at least two ranks, all on this host. ``memory`` is from `share_memory` and has
    `bytes_needed` bytes.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, memory: mmap.mmap, adder: Adder) -> None:
        super().__init__(mpi_comm.rank, mpi_comm.size)
        self._mpi_comm = mpi_comm
        self._adder = adder
        self._flags = Barrier(memory, self.rank, self.size, cores_of_job())
        n_slots, self._chunk_bytes = _ring(self.size)
        slots = np.frombuffer(memory, np.uint8, offset=barrier.bytes_needed(self.size))
        self._slots = slots.reshape(n_slots, -1)
        self._turn = 0
        self._layouts: dict[tuple[int, int, Dtype], _Layout] = {}

    @override
    def _sum(self, array: Array, divisor: int, begin: int, end: int) -> Steps:
        add_up = self._adder.add_up_rows
        # 16-bit sums are divided in float32 before they are rounded. All others are divided while
        # they are copied, which costs no extra time.
        is_narrow = array.itemsize == 2
        scale, factor = division(divisor, array.dtype)
        length = self._length(array.dtype)
        n_chunks = -(-array.size // length)
        under_way: list[tuple[Array, _Layout]] = []
        for step in range(n_chunks + 2):
            if step < n_chunks:
                chunk = array[step * length : (step + 1) * length]
                layout = self._next_layout(chunk.size, array.dtype)
                under_way.append((chunk, layout))
                for where, slot in layout.given:
                    slot[...] = chunk[where].reshape(slot.shape)
            if 1 <= step <= n_chunks:
                chunk, layout = under_way[-1 if step == n_chunks else -2]
                first, second, rows = layout.parts
                if self.rank == 0:
                    first = chunk[layout.own]
                elif self.rank == 1:
                    second = chunk[layout.own]
                add_up(first, second, rows, layout.total, divisor if is_narrow else 1)
            if step >= 2:
                chunk, layout = under_way.pop(0)
                totals = layout.totals
                if end - begin < array.size:
                    offset = (step - 2) * length
                    totals = list(_within(begin - offset, end - offset, totals))
                for where, total in totals:
                    if is_narrow:
                        chunk[where] = total
                    else:
                        scale(total, factor, chunk[where])
            if step <= n_chunks:
                yield from self._barrier()

    @override
    def _distribute(self, array: Array, begin: int, end: int) -> Steps:
        length = self._length(array.dtype)
        n_chunks = -(-array.size // length)
        before: tuple[Array, Array, int, int] | None = None
        for step in range(n_chunks + 1):
            now = None
            if step < n_chunks:
                offset = step * length
                chunk = array[offset : offset + length]
                low, high = np.clip([begin - offset, end - offset], 0, chunk.size)
                common = self._next_slot().view(array.dtype)[: chunk.size]
                common[low:high] = chunk[low:high]
                now = chunk, common, low, high
            if before is not None:
                chunk, common, low, high = before
                chunk[:low] = common[:low]
                chunk[high:] = common[high:]
            before = now
            if step < n_chunks:
                yield from self._barrier()

    def _barrier(self) -> Steps:
        """Wait until all ranks have called this."""
        if not barrier.KEEPS_ORDER:
            yield self._mpi_comm.Ibarrier()
            return
        self._flags.arrive()
        if not self._flags.Test():
            yield self._flags

    def _length(self, dtype: Dtype) -> int:
        """Return the number of elements of a chunk, a multiple of the number of ranks."""
        return self._chunk_bytes // dtype.itemsize // self.size * self.size

    def _next_slot(self) -> Array:
        self._turn = (self._turn + 1) % len(self._slots)
        return self._slots[self._turn]

    def _next_layout(self, n: int, dtype: Dtype) -> _Layout:
        """Return the layout of a chunk of ``n`` elements in the next slot."""
        slot = self._next_slot()
        key = self._turn, n, dtype
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            length = self._length(dtype)
            self._layouts[key] = _Layout.of(slot.view(dtype), length, n, self.rank, self.size)
        return self._layouts[key]


def _within(
    begin: int, end: int, totals: list[tuple[slice, Array]]
) -> Iterator[tuple[slice, Array]]:
    """Restrict ``totals`` to the elements from ``begin`` to ``end`` of the chunk."""
    for where, total in totals:
        low, high = max(where.start, begin), min(where.stop, end)
        if low < high:
            yield slice(low, high), total[low - where.start : high - where.start]


class _Layout(NamedTuple):
    """The places of a chunk's shards in its slot.

    The chunks of ranks 0 and 1, which the sums overwrite, are whole. For the other ranks' chunks,
    the shards that one rank sums form the rows of a matrix. So each rank reads from one place,
    because the pages around it are also mapped and count as memory of every rank.
    """

    #: Elements of the chunk that this rank sums.
    own: slice
    #: Elements of the chunk to copy to shared memory, with their destinations, which may be
    #: matrices. Ranks 0 and 1 do not copy the elements that they sum themselves.
    given: list[tuple[slice, Array]]
    #: This rank's shards from rank 0, from rank 1, and from the others as a matrix, whose first
    #: row is unused.
    parts: tuple[Array, Array, Array]
    #: Shared memory for this rank's sum. It overwrites the part of rank 0, or on rank 0 of rank 1.
    total: Array
    #: Elements of the chunk, and the shared memory that holds their sums.
    totals: list[tuple[slice, Array]]

    @classmethod
    def of(cls, slot: Array, length: int, n: int, rank: int, size: int) -> _Layout:
        """Lay out a chunk of ``n`` elements in a slot for chunks of ``length`` elements."""
        first, second = slot[:n], slot[length : length + n]
        width = -(-n // size)
        own = slice(min(rank * width, n), min((rank + 1) * width, n))
        shape = size, _chunks_in_slot(size) - 2, length // size
        matrices = slot[2 * length : 2 * length + math.prod(shape)].reshape(shape)
        if rank < 2:
            others = [slice(0, own.start), slice(own.stop, n)]
            given = [(it, (first, second)[rank][it]) for it in others]
        else:
            n_full = n // max(width, 1)
            rest = slice(n_full * width, n)
            given = [
                (slice(0, rest.start), matrices[:n_full, rank - 1, :width]),
                (rest, matrices[n_full : n_full + 1, rank - 1, : n - rest.start]),
            ]
        rows = matrices[rank, :, : own.stop - own.start]
        parts = first[own], second[own], rows
        of_rank_0, of_others = slice(0, min(width, n)), slice(min(width, n), n)
        return cls(
            own=own,
            given=[(where, to) for where, to in given if to.size],
            parts=parts,
            total=parts[1 if rank == 0 else 0],
            totals=[(of_rank_0, second[of_rank_0]), (of_others, first[of_others])],
        )
