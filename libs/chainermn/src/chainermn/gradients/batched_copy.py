"""Copy many arrays in GPU memory into one buffer and back, with one kernel per dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn.transport.gpu.device import is_recordable
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from chainermn.transport.gpu.device import Gpu


#: Names of the dtypes that arrays and buffers may have.
DTYPES = ("float16", "bfloat16", "float32", "float64")

# Bytes, in the wider dtype, that a block copies: four times 16 in each of its 256 threads.
_PIECE_BYTES = 1 << 14

#: Arrays begin at multiples of this number of elements in the buffer. That is at least 128 bytes,
#: the unit in which a GPU accesses its memory.
ALIGNMENT = 64


@functools.cache
def source(dtype: str, wire: str) -> str:
    """Return the CUDA code of the two kernels for arrays and a buffer of these dtypes."""
    code = Path(__file__).with_suffix(".cu").read_text()
    return f"#define ALIGNMENT {ALIGNMENT}\n{code}KERNELS({dtype}, {wire})\n"


def piece_length(dtype: np.dtype[Any], wire_dtype: np.dtype[Any]) -> int:
    """Return the number of elements that a GPU block copies."""
    return _PIECE_BYTES // max(dtype.itemsize, wire_dtype.itemsize)


def pieces(
    members: Sequence[int], sizes: Sequence[int], positions: Sequence[int], length: int
) -> Array:
    """Divide arrays into pieces, one for each GPU block.

    Parameters
    ----------
    members : sequence of int
        Indices of the arrays.
    sizes, positions : sequence of int
        Number of elements and position in the buffer of each array.
    length : int
        Largest number of elements in a piece.

    Returns
    -------
    ndarray of int64, shape (number of pieces, 4)
        For each piece: index of its array, first element in the array, number of elements, and
        position in the buffer.
    """
    found = [
        (index, start, min(length, sizes[index] - start), positions[index] + start)
        for index in members
        for start in range(0, sizes[index], length)
    ]
    return np.array(found, np.int64).reshape(-1, 4)


class BatchedCopy:
    """Copies arrays of given sizes and dtypes into a buffer and back. Uploads the layout once.

    Attributes
    ----------
    length : int
        Minimum number of elements of the buffer. Elements between the arrays are padding, which
        gathering sets to zero.
    """

    def __init__(
        self,
        gpu: Gpu,
        sizes: Sequence[int],
        dtypes: Sequence[np.dtype[Any]],
        wire_dtype: np.dtype[Any],
    ) -> None:
        self._gpu = gpu
        self._wire = wire_dtype.name
        ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes], dtype=np.int64)
        positions = [0, *ends.tolist()]
        self.length = positions.pop()
        self._pieces: dict[str, Array] = {}
        for dtype in dict.fromkeys(dtypes):
            members = [index for index, other in enumerate(dtypes) if other == dtype]
            table = pieces(members, sizes, positions, piece_length(dtype, wire_dtype))
            if len(table):
                self._pieces[dtype.name] = gpu.upload(table)
        self._addresses: Array | None = None
        self._pointers: Array | None = None

    def gather(self, arrays: Sequence[Array], buffer: Array) -> None:
        """Start copying the arrays into the buffer, cast to its dtype."""
        self._run("gather", arrays, buffer)

    def scatter(self, buffer: Array, arrays: Sequence[Array], divisor: int) -> None:
        """Start copying the buffer into the arrays, divided by ``divisor`` and then cast."""
        self._run("scatter", arrays, buffer, np.float64(divisor))

    def _run(self, what: str, arrays: Sequence[Array], buffer: Array, *more: Any) -> None:
        if not self._pieces:
            return
        addresses = np.array([self._gpu.pointer(array) for array in arrays], np.uint64)
        pointers = self._pointers
        if is_recordable():
            # A CUDA graph uploads a table of its own whenever it is launched.
            pointers = self._gpu.upload(addresses)
        # The memory pool usually gives a gradient the same address in each iteration.
        elif self._addresses is None or not np.array_equal(addresses, self._addresses):
            pointers = self._pointers = self._gpu.upload(addresses)
            self._addresses = addresses
        for dtype, table in self._pieces.items():
            arguments = table, pointers, np.uint64(self._gpu.pointer(buffer)), *more
            kernel = f"{what}_{dtype}_{self._wire}"
            self._gpu.run(source(dtype, self._wire), kernel, len(table), arguments)
