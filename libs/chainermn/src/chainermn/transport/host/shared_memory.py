"""Reduction over the ranks of one host, through shared memory."""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np
from typing_extensions import override

from chainermn.transport.host.arithmetic import Adder, division
from chainermn.transport.reducer import Array, Dtype, Pending, Reducer, Steps, shard_bounds

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_DIRECTORY = "/dev/shm"

# Each rank has a ring of slots, three of which are in use at a time. A chunk is large enough to
# outweigh Python's overhead, and small enough to stay in the cache. By the time a slot is used
# again, the other cores have evicted it from their caches: in a smaller ring, writing took four
# times as long.
_CHUNK_BYTES = 1 << 20
_N_SLOTS = 8

# One cache line per rank, and the adjacent one, which processors prefetch along with it.
_FLAG_BYTES = 128

# On these processors, other cores see the writes of a core in the order in which it made them.
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")
_LOOKS_BEFORE_YIELDING = 64
_LOOKS_BEFORE_SLEEPING = 4096
_SECONDS_OF_SLEEP = 5e-5

_MOST_LAYOUTS = 512


def bytes_needed(size: int) -> int:
    """Return the size of the memory that ``size`` ranks share: a little over 8 MiB per rank."""
    return size * (_FLAG_BYTES + _N_SLOTS * _CHUNK_BYTES)


def share_memory(mpi_comm: MPI.Intracomm) -> mmap.mmap | str:
    """Return memory that all ranks share, or the reason why this rank has none. Collective.

    The kernel frees the memory as soon as the last rank unmaps it, even if ranks are killed.
    """
    n_bytes = bytes_needed(mpi_comm.size)
    path: Path | str = ""
    if mpi_comm.rank == 0:
        path = _made_or_reason(lambda: _create_file(n_bytes))
    path = cast("Path | str", mpi_comm.bcast(path))
    memory = path if isinstance(path, str) else _made_or_reason(lambda: _map_file(path, n_bytes))
    mpi_comm.Barrier()
    if mpi_comm.rank == 0 and isinstance(path, Path):
        path.unlink()
    return memory


def _made_or_reason(make: Callable[[], T]) -> T | str:
    try:
        return make()
    except Exception as error:  # of any kind: the other ranks wait for the outcome
        return str(error) or repr(error)


def _create_file(n_bytes: int) -> Path:
    descriptor, path = tempfile.mkstemp(prefix="chainermn-", dir=_DIRECTORY)
    try:
        # Otherwise writing to the memory on a full file system would kill the process.
        os.posix_fallocate(descriptor, 0, n_bytes)
    except Exception:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return Path(path)


def _map_file(path: Path, n_bytes: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), n_bytes)


class SharedMemoryReducer(Reducer):
    """Reduces over ranks of one host, chunk by chunk.

    In each step a rank copies one chunk into shared memory, sums its shard of the previous chunk,
    and copies the sums of the chunk before that back into its array. Then all ranks meet once.

    There are at least two ranks, all on this host; ``memory`` is from `share_memory`.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, memory: mmap.mmap, adder: Adder) -> None:
        super().__init__(mpi_comm.rank, mpi_comm.size)
        self._mpi_comm = mpi_comm
        self._adder = adder
        n_flags = self.size * _FLAG_BYTES
        self._flags = _Flags(memoryview(memory)[:n_flags], self.rank, self.size)
        slots = np.frombuffer(memory, np.uint8, offset=n_flags)
        self._slots = slots.reshape(_N_SLOTS, self.size, _CHUNK_BYTES)
        self._turn = 0
        self._layouts: dict[tuple[int, int, Dtype], _Layout] = {}

    @override
    def allreduce(self, array: Array, divisor: int = 1, wire_dtype: Dtype | None = None) -> Steps:
        """See `AllReducer.allreduce`. Ignores ``wire_dtype``, since nothing leaves the host."""
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

    def _sum(self, array: Array, divisor: int, begin: int, end: int) -> Steps:
        """Replace ``array[begin:end]`` by the sum, divided by ``divisor``."""
        add_up = self._adder.add_up
        # 16-bit sums are divided in float32, before they are rounded; all others are divided
        # while they are copied, which costs no extra time.
        is_narrow = array.itemsize == 2
        scale, factor = division(divisor, array.dtype)
        length = _CHUNK_BYTES // array.itemsize
        n_chunks = -(-array.size // length)
        under_way: list[tuple[Array, _Layout]] = []
        for step in range(n_chunks + 2):
            if step < n_chunks:
                chunk = array[step * length : (step + 1) * length]
                layout = self._next_layout(chunk.size, array.dtype)
                under_way.append((chunk, layout))
                for where, slot in layout.given:
                    slot[:] = chunk[where]
            if 1 <= step <= n_chunks:
                chunk, layout = under_way[-1 if step == n_chunks else -2]
                parts = layout.parts.copy()
                parts[self.rank] = chunk[layout.own]
                add_up(parts, layout.total, divisor if is_narrow else 1)
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

    def _distribute(self, array: Array, begin: int, end: int) -> Steps:
        """Give the others ``array[begin:end]``, and fill the rest with theirs."""
        length = _CHUNK_BYTES // array.itemsize
        n_chunks = -(-array.size // length)
        before: tuple[Array, Array, int, int] | None = None
        for step in range(n_chunks + 1):
            now = None
            if step < n_chunks:
                offset = step * length
                chunk = array[offset : offset + length]
                low, high = np.clip([begin - offset, end - offset], 0, chunk.size)
                common = self._next_slots()[0].view(array.dtype)[: chunk.size]
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
        if not _KEEPS_ORDER:
            yield self._mpi_comm.Ibarrier()
            return
        self._flags.arrive()
        if not self._flags.Test():
            yield self._flags

    def _next_slots(self) -> Array:
        self._turn = (self._turn + 1) % _N_SLOTS
        return self._slots[self._turn]

    def _next_layout(self, n: int, dtype: Dtype) -> _Layout:
        """Return the layout of a chunk of ``n`` elements in the next slots."""
        slots = self._next_slots()
        key = self._turn, n, dtype
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = _Layout.of(slots.view(dtype), n, self.rank)
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
    """Where the shards of a chunk lie in the slots for it."""

    #: Elements of the chunk that this rank sums.
    own: slice
    #: Elements of the chunk that other ranks sum, and the shared memory to copy them to.
    given: list[tuple[slice, Array]]
    #: Shared memory with each rank's elements of this rank's shard.
    parts: list[Array]
    #: Shared memory for this rank's sum: it overwrites the part of rank 0, or on rank 0 of rank 1.
    total: Array
    #: Elements of the chunk, and the shared memory that holds their sums.
    totals: list[tuple[slice, Array]]

    @classmethod
    def of(cls, slots: Array, n: int, rank: int) -> _Layout:
        """Divide slots, of shape (size, at least n), for a chunk of ``n`` elements."""
        bounds = shard_bounds(n, len(slots))
        begin, end = bounds[rank]
        others = [slice(0, begin), slice(end, n)]
        parts = [slot[begin:end] for slot in slots]
        first = bounds[0][1]
        return cls(
            own=slice(begin, end),
            given=[(it, slots[rank, it]) for it in others if it.start < it.stop],
            parts=parts,
            total=parts[1 if rank == 0 else 0],
            totals=[(slice(0, first), slots[1, :first]), (slice(first, n), slots[0, first:n])],
        )


class _Flags:
    """A barrier in shared memory: for each rank, the number of times it has arrived."""

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        self._counts = memory.cast("q")
        stride = _FLAG_BYTES // self._counts.itemsize
        self._own = rank * stride
        self._others = [other * stride for other in range(size) if other != rank]
        self._arrivals = 0

    def arrive(self) -> None:
        """Tell the others that this rank has arrived."""
        self._arrivals += 1
        self._counts[self._own] = self._arrivals

    def Test(self) -> bool:
        """Tell whether the others have arrived as often as this rank."""
        counts, arrivals = self._counts, self._arrivals
        for other in self._others:  # noqa: SIM110 - faster than all()
            if counts[other] < arrivals:
                return False
        return True

    def Wait(self) -> None:
        """Wait for the others: spin for some microseconds, then yield the core, then sleep."""
        counts, arrivals = self._counts, self._arrivals
        for other in self._others:
            looks = 0
            while counts[other] < arrivals:
                looks += 1
                if looks > _LOOKS_BEFORE_SLEEPING:
                    time.sleep(_SECONDS_OF_SLEEP)
                elif looks > _LOOKS_BEFORE_YIELDING:
                    os.sched_yield()
