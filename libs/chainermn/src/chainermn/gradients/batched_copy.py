"""Copies of many arrays in GPU memory into one buffer and back, by one kernel each way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from chainermn.transport.gpu.device import Gpu


#: The values of ``enum Kind`` in batched_copy.cu.
KINDS = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}

# Elements per block: 16 per thread.
BLOCK_LENGTH = 1 << 12


@functools.cache
def source() -> str:
    """Return the CUDA code of the kernels."""
    return Path(__file__).with_suffix(".cu").read_text()


def layout(sizes: Sequence[int], dtypes: Sequence[np.dtype[Any]]) -> tuple[Array, ...]:
    """Lay arrays out in a buffer, one behind the other; return what the kernels read.

    Returns
    -------
    kinds, sizes, offsets : ndarray of shape (number of arrays,)
        Kind, number of elements and position in the buffer of each array.
    block_arrays, block_starts : ndarray of shape (number of blocks,)
        Index of the array that each GPU block copies, and the block's first element in that array.
    """
    kinds = np.array([KINDS[dtype.name] for dtype in dtypes], np.int32)
    lengths = np.array(sizes, np.int64)
    offsets = np.cumsum(lengths) - lengths
    counts = -(-lengths // BLOCK_LENGTH)
    block_arrays = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    firsts = np.cumsum(counts) - counts
    numbers = np.arange(len(block_arrays)) - np.repeat(firsts, counts)
    return kinds, lengths, offsets, block_arrays, (numbers * BLOCK_LENGTH).astype(np.int64)


class BatchedCopy:
    """Copies arrays of given sizes and dtypes into a buffer and back. Uploads the layout once."""

    def __init__(
        self,
        gpu: Gpu,
        sizes: Sequence[int],
        dtypes: Sequence[np.dtype[Any]],
        wire_dtype: np.dtype[Any],
    ) -> None:
        self._gpu = gpu
        self._wire = wire_dtype.name
        tables = layout(sizes, dtypes)
        self._n_blocks = len(tables[-1])
        self._tables = [gpu.upload(table) for table in tables]
        self._addresses: Array | None = None
        self._pointers: Array | None = None

    def gather(self, arrays: Sequence[Array], buffer: Array) -> None:
        """Begin to copy the arrays into the buffer, cast to its dtype."""
        self._run("gather", arrays, buffer)

    def scatter(self, buffer: Array, arrays: Sequence[Array], divisor: int) -> None:
        """Begin to copy the buffer into the arrays, divided by ``divisor``, then cast."""
        self._run("scatter", arrays, buffer, np.float64(divisor))

    def _run(self, what: str, arrays: Sequence[Array], buffer: Array, *more: Any) -> None:
        if self._n_blocks == 0:
            return
        addresses = np.array([self._gpu.pointer(array) for array in arrays], np.uint64)
        # The memory pool usually gives a gradient the same address in each iteration.
        if self._addresses is None or not np.array_equal(addresses, self._addresses):
            self._pointers, self._addresses = self._gpu.upload(addresses), addresses
        where = np.int64(BLOCK_LENGTH), np.uint64(self._gpu.pointer(buffer))
        arguments = self._pointers, *self._tables, *where, *more
        self._gpu.run(source(), f"{what}_{self._wire}", self._n_blocks, arguments)
