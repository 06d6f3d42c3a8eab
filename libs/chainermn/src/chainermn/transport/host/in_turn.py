"""Reduce over more ranks than their host has cores: the ranks add one after another."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from typing_extensions import override

from chainermn.transport.host import barrier
from chainermn.transport.host.arithmetic import Adder
from chainermn.transport.host.barrier import Barrier
from chainermn.transport.host.futex import Futex
from chainermn.transport.host.sharing import LINE_BYTES, SharingReducer
from chainermn.transport.reducer import Array, Dtype, Steps

if TYPE_CHECKING:
    from mpi4py import MPI

# Chunks in progress at the same time: one rank adds to the first while another, on another core,
# adds to the second.
_N_SLOTS = 4
#: Bytes of a chunk.
CHUNK_BYTES = 1 << 18

_WORD_BYTES = 8
# Words of the line that a rank writes: the numbers of chunks that it has given and taken.
_GIVEN, _TAKEN = 0, 1
_WORDS = LINE_BYTES // _WORD_BYTES

_PROBES = 32

# Time after which a sleeping rank looks by itself, although the others always wake it.
_SECONDS_OF_SLEEP = 1.0


#: Largest number of integers for `InTurnReducer.maximum`.
MOST_INTEGERS = 24


def bytes_needed(size: int) -> int:
    """Return the size of the memory that ``size`` ranks share: a little over 1 MiB."""
    integers = 2 * size * MOST_INTEGERS * _WORD_BYTES
    counters = size * LINE_BYTES
    return barrier.bytes_needed(size) + counters + integers + _N_SLOTS * CHUNK_BYTES


class InTurnReducer(SharingReducer):
    """Reduces over ranks of one host, which add to the sum one after another.

    If ranks share cores, summing shards in parallel saves no time, and each barrier costs a turn
    of every rank. Here a rank has two turns for each chunk: it adds its elements to the sum of the
    ranks before it, and it reads the sum of all. In between, it sleeps.

    Needs at least two ranks, all on this host, and `Futex.is_available`. ``memory`` is from
    `share_memory` and has `bytes_needed` bytes.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, memory: mmap.mmap, adder: Adder) -> None:
        super().__init__(mpi_comm.rank, mpi_comm.size)
        self._adder = adder
        self._mpi_comm = mpi_comm
        self._barrier = Barrier(memory, self.rank, self.size, 1, self._let_mpi_send)
        offset = barrier.bytes_needed(self.size)
        self._counters = _Counters(memory, offset, self.rank, self.size)
        offset += self.size * LINE_BYTES
        shape = 2, self.size, MOST_INTEGERS
        integers = np.frombuffer(memory, np.int64, math.prod(shape), offset)
        self._integers = integers.reshape(shape)
        slots = np.frombuffer(memory, np.uint8, offset=offset + integers.nbytes)
        self._slots = slots.reshape(_N_SLOTS, CHUNK_BYTES)
        self._n_maxima = 0
        # Number of the last chunk.
        self._number = 0

    def maximum(self, array: Array) -> None:
        """Replace up to `MOST_INTEGERS` 64-bit integers with their maxima over the ranks."""
        # Others may still read the integers of the last call, but not those of the one before.
        self._n_maxima += 1
        everywhere = self._integers[self._n_maxima % 2, :, : array.size]
        everywhere[self.rank] = array
        self._barrier.arrive()
        self._barrier.Wait()
        np.max(everywhere, axis=0, out=array)

    def _let_mpi_send(self) -> None:
        """Let MPI continue with messages of this rank, for which others may be waiting.

        They have not reached `maximum` yet, and each call of MPI sends little.
        """
        for _ in range(_PROBES):
            self._mpi_comm.Iprobe()

    @override
    def _sum(self, array: Array, divisor: int, begin: int, end: int) -> Steps:
        # Sums of 16-bit elements stay in float32 until the end.
        dtype = np.dtype(np.float32) if array.itemsize == 2 else array.dtype
        chunks = _chunks(array.size, dtype)
        lag = _N_SLOTS - 1
        first = self._number + 1
        for number in range(first, first + len(chunks) + lag):
            if number < first + len(chunks):
                where = chunks[number - first]
                yield from self._add(array[where], number, dtype)
            if number - lag >= first:
                where = chunks[number - lag - first]
                low, high = max(where.start, begin), max(where.start, min(where.stop, end))
                yield from self._wait_for(_GIVEN, [self.size - 1], number - lag)
                if low < high:
                    total = self._slot(number - lag, dtype)
                    part = total[low - where.start : high - where.start]
                    self._adder.divide_into(part, divisor, array[low:high])
                self._counters.set(_TAKEN, number - lag)

    def _add(self, chunk: Array, number: int, dtype: Dtype) -> Steps:
        """Add a chunk to the sum of the ranks before this one."""
        self._number = number
        total = self._slot(number, dtype)[: chunk.size]
        if self.rank == 0:
            yield from self._wait_until_free(number)
            self._adder.copy(chunk, total)
        else:
            yield from self._wait_for(_GIVEN, [self.rank - 1], number)
            self._adder.add_to(total, chunk)
        self._counters.set(_GIVEN, number)

    @override
    def _distribute(self, array: Array, begin: int, end: int) -> Steps:
        for where in _chunks(array.size, array.dtype):
            self._number = number = self._number + 1
            common = self._slot(number, array.dtype)
            chunk = array[where]
            low, high = np.clip([begin - where.start, end - where.start], 0, chunk.size)
            yield from self._wait_until_free(number)
            common[low:high] = chunk[low:high]
            self._counters.set(_GIVEN, number)
            yield from self._wait_for(_GIVEN, range(self.size), number)
            chunk[:low] = common[:low]
            chunk[high:] = common[high : chunk.size]
            self._counters.set(_TAKEN, number)

    def _slot(self, number: int, dtype: Dtype) -> Array:
        return self._slots[number % _N_SLOTS].view(dtype)

    def _wait_until_free(self, number: int) -> Steps:
        """Wait until all ranks have read the previous chunk in the slot of this chunk."""
        return self._wait_for(_TAKEN, range(self.size), number - _N_SLOTS)

    def _wait_for(self, word: int, ranks: Iterable[int], number: int) -> Steps:
        reached = _Reached(self._counters, [rank * _WORDS + word for rank in ranks], number)
        if not reached.Test():
            yield reached


def _chunks(n: int, dtype: Dtype) -> list[slice]:
    length = CHUNK_BYTES // dtype.itemsize
    return [slice(start, min(start + length, n)) for start in range(0, n, length)]


class _Counters:
    """Words in shared memory that only grow. Each rank writes some of them."""

    def __init__(self, memory: mmap.mmap, offset: int, rank: int, size: int) -> None:
        self.words = memoryview(memory)[offset : offset + size * LINE_BYTES].cast("q")
        self._memory, self._offset = memory, offset
        self._futexes: dict[int, Futex] = {}
        self._own = rank * _WORDS

    def set(self, word: int, number: int) -> None:
        """Set a word of this rank, and wake the ranks that wait for it."""
        place = self._own + word
        self.words[place] = number
        self.futex_at(place).wake()

    def futex_at(self, place: int) -> Futex:
        """Return the futex of a word. Most ranks only ever wait for a few words."""
        if place not in self._futexes:
            futex = Futex.at(self._memory, self._offset + place * _WORD_BYTES)
            self._futexes[place] = cast(Futex, futex)
        return self._futexes[place]


class _Reached:
    """An operation that completes when all of some words have reached a number."""

    def __init__(self, counters: _Counters, places: Sequence[int], number: int) -> None:
        self._counters, self._places, self._number = counters, places, number

    def Test(self) -> bool:
        """Tell whether all words have reached the number."""
        words, number = self._counters.words, self._number
        for place in self._places:  # noqa: SIM110 - faster than all()
            if words[place] < number:
                return False
        return True

    def Wait(self) -> None:
        """Sleep until all words have reached the number."""
        words, number = self._counters.words, self._number
        for place in self._places:
            while (word := words[place]) < number:
                self._counters.futex_at(place).wait(word, _SECONDS_OF_SLEEP)
