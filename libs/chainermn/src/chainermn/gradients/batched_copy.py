"""Many arrays in GPU memory copied into one buffer, and back, by one kernel each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from chainermn.transport.gpu.device import Gpu

Array = NDArray[Any]

#: The kinds of numbers, as in batched_copy.cu.
KINDS = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}

# Elements a block copies: 16 a thread.
BLOCK_LENGTH = 1 << 12


@functools.cache
def source() -> str:
    """Return the CUDA code of the kernels."""
    return Path(__file__).with_suffix(".cu").read_text()


class Layout:
    """Where arrays lie in a buffer, one behind the other, and what each block of threads copies.

    Parameters
    ----------
    sizes : sequence of int
        Elements of each array.
    dtypes : sequence of dtype
        Of each: float16, bfloat16, float32 or float64.

    Attributes
    ----------
    size : int
        Elements of all.
    kinds, sizes, offsets : ndarray, one element an array
    block_arrays, block_starts : ndarray, one element a block
        The array that the block works on, and its first element there.
    """

    def __init__(self, sizes: Sequence[int], dtypes: Sequence[np.dtype[Any]]) -> None:
        self.kinds = np.array([KINDS[dtype.name] for dtype in dtypes], np.int32)
        self.sizes = np.array(sizes, np.int64)
        ends = np.cumsum(self.sizes)
        self.offsets = ends - self.sizes
        self.size = int(ends[-1]) if len(ends) else 0
        counts = -(-self.sizes // BLOCK_LENGTH)
        self.block_arrays = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
        firsts = np.cumsum(counts) - counts
        numbers = np.arange(len(self.block_arrays)) - np.repeat(firsts, counts)
        self.block_starts = (numbers * BLOCK_LENGTH).astype(np.int64)


class BatchedCopy:
    """Copies arrays of one layout into a buffer and back. Uploads the layout once.

    Parameters
    ----------
    gpu : Gpu
    layout : Layout
    wire_dtype : dtype
        Of the buffer.
    """

    def __init__(self, gpu: Gpu, layout: Layout, wire_dtype: np.dtype[Any]) -> None:
        self._gpu = gpu
        self._n_blocks = len(layout.block_arrays)
        self._wire = wire_dtype.name
        tables = (
            *(layout.kinds, layout.sizes, layout.offsets),
            *(layout.block_arrays, layout.block_starts),
        )
        self._tables = [gpu.upload(table) for table in tables]
        self._addresses: Array | None = None
        self._pointers: Array | None = None

    def gather(self, arrays: Sequence[Array], buffer: Array) -> None:
        """Begin to fill the buffer with the elements of the arrays, cast to its dtype."""
        self._run("gather", arrays, buffer)

    def scatter(self, buffer: Array, arrays: Sequence[Array], divisor: int) -> None:
        """Begin to fill the arrays with the elements of the buffer, divided, then cast."""
        self._run("scatter", arrays, buffer, np.float64(divisor))

    def _run(self, what: str, arrays: Sequence[Array], buffer: Array, *more: Any) -> None:
        if self._n_blocks == 0:
            return
        addresses = np.array([self._gpu.pointer(array) for array in arrays], np.uint64)
        # Chainer's memory pool mostly gives gradients the same place in each iteration.
        if self._addresses is None or not np.array_equal(addresses, self._addresses):
            self._pointers, self._addresses = self._gpu.upload(addresses), addresses
        arguments = (
            *(self._pointers, *self._tables),
            *(np.int64(BLOCK_LENGTH), np.uint64(self._gpu.pointer(buffer)), *more),
        )
        self._gpu.run(source(), f"{what}_{self._wire}", self._n_blocks, arguments)
