"""Sum the arrays of several ranks, and cast quickly to and from the wire dtype.

NumPy casts between float32 and float16 element by element, which takes 2 to 3 ns each, or 65 ns
if the float16 is subnormal, as small gradients are. That can take longer than sending the full
bytes. This module casts with vectorized operations, in blocks that stay in the cache.
``ml_dtypes`` already has fast casts for bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chainermn.transport.reducer import Array, Dtype

FLOAT16: Dtype = np.dtype(np.float16)

# Elements per block. Together with the scratch memory, a block fits in the second-level cache.
_BLOCK = 1 << 15


def _bits(number: float) -> NDArray[np.uint32]:
    return np.array(number, np.float32).view(np.uint32)


_EXPONENT = _bits(np.inf)
_SIGN = _bits(-0.0)
_MAGNITUDE = ~_SIGN
_SMALLEST_NORMAL_HALF = _bits(2.0**-14)
_FIRST_INFINITE_HALF = _bits(65520)
_INFINITE_HALF = _bits(65536)
_13, _16 = np.array(13, np.uint32), np.array(16, np.uint32)
_RAISE = np.array((13 << 23) + (2 << 10), np.uint32)


class Adder:
    """Sums arrays, and copies them into arrays of other dtypes. For one thread at a time."""

    #: Largest finite magnitude that has become infinite in float16; 0 if none has.
    overflow = 0.0

    @np.errstate(all="ignore")  # a warning turned into an error would stop only one rank
    def add_up(self, parts: Sequence[Array], out: Array, divisor: int = 1) -> None:
        """Sum at least two arrays, in order, and divide the sum by ``divisor``.

        All arrays have the same length and dtype. 16-bit elements are summed and divided in
        float32, then rounded. ``out`` may be one of the first two of ``parts``, or any of them if
        the elements have 16 bits.
        """
        if out.dtype.itemsize == 2:
            for start in range(0, out.size, _BLOCK):
                block = slice(start, start + _BLOCK)
                self._add_up_in_float32([part[block] for part in parts], out[block], divisor)
            return
        first, second, *rest = parts
        np.add(first, second, out)
        for part in rest:
            np.add(out, part, out)
        divide(out, divisor)

    @np.errstate(all="ignore")  # a warning turned into an error would stop only one rank
    def add_up_rows(
        self, first: Array, second: Array, rows: Array, out: Array, divisor: int = 1
    ) -> None:
        """Sum as `add_up` does: two arrays, then the rows of a matrix except the first.

        The first row is scratch memory. This takes two calls of NumPy for any number of rows.
        """
        # NumPy sums the rows of a matrix in order, unless it has a single column.
        if len(rows) < 2 or out.size < 2 or out.dtype.itemsize == 2:
            self.add_up([first, second, *rows[1:]], out, divisor)
            return
        np.add(first, second, rows[0])
        np.add.reduce(rows, axis=0, out=out)
        divide(out, divisor)

    @np.errstate(all="ignore")  # a warning turned into an error would stop only one rank
    def add_to(self, total: Array, part: Array) -> None:
        """Add an array to a sum, whose dtype is float32 if the elements have 16 bits."""
        if part.dtype == total.dtype:
            np.add(total, part, total)
            return
        for start in range(0, total.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            addend = self._sums[0, : total[block].size]
            self.copy(part[block], addend)
            np.add(total[block], addend, total[block])

    @np.errstate(all="ignore")  # a warning turned into an error would stop only one rank
    def divide_into(self, total: Array, divisor: int, out: Array) -> None:
        """Divide a sum and round the quotient to the dtype of ``out``."""
        operate, operand = division(divisor, total.dtype)
        if out.dtype == total.dtype:
            operate(total, operand, out)
            return
        for start in range(0, out.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            quotient = self._sums[0, : out[block].size]
            operate(total[block], operand, quotient)
            self.copy(quotient, out[block])

    def _add_up_in_float32(self, parts: Sequence[Array], out: Array, divisor: int) -> None:
        total, addend = self._sums[:, : out.size]
        self.copy(parts[0], total)
        for part in parts[1:]:
            self.copy(part, addend)
            np.add(total, addend, total)
        divide(total, divisor)
        self.copy(total, out)

    @np.errstate(all="ignore")  # a warning turned into an error would stop only one rank
    def copy(self, source: Array, out: Array) -> None:
        """Round floats to the dtype of ``out``: to nearest, ties to even.

        The result equals that of NumPy's own cast, except for the payload bits of NaN. Both arrays
        are one-dimensional and C-contiguous.
        """
        if out.dtype == FLOAT16 and source.dtype.itemsize > 2:
            for start in range(0, source.size, _BLOCK):
                self._narrow(source[start : start + _BLOCK], out[start : start + _BLOCK])
        elif source.dtype == FLOAT16 and out.dtype == np.float32:
            for start in range(0, source.size, _BLOCK):
                self._widen(source[start : start + _BLOCK], out[start : start + _BLOCK])
        else:
            np.copyto(out, source, casting="unsafe")

    def _narrow(self, source: Array, out: Array) -> None:
        """Round a block to float16.

        Two adjacent float32 numbers with exponent ``e + 13`` differ by as much as two adjacent
        float16 numbers with exponent ``e``: one step. So adding ``2 ** (e + 13)`` to a magnitude
        with exponent ``e`` makes the processor round it to whole steps, and leaves the number of
        steps in the lowest bits of the sum. If ``e`` is raised to at least -14, this also holds
        for subnormal float16 numbers. The bits of the float16 are the number of steps, which
        includes the leading bit of the significand, plus ``e + 14`` shifted to the position of the
        exponent. The second term of `_RAISE` corrects for the different biases of the exponents.
        """
        if source.dtype != np.float32:
            self._narrow_by_numpy(source, out)
            return
        bits = source.view(np.uint32)
        halves, power = self._scratch[:, : bits.size]
        np.bitwise_and(bits, _MAGNITUDE, halves)
        largest = halves.max()
        if largest >= _FIRST_INFINITE_HALF:
            if largest > _EXPONENT:  # NaN
                self._narrow_by_numpy(source, out)
                return
            self._note_overflow(source)
            np.minimum(halves, _INFINITE_HALF, out=halves)
        np.bitwise_and(halves, _EXPONENT, power)
        np.maximum(power, _SMALLEST_NORMAL_HALF, out=power)
        np.add(power, _RAISE, power)
        np.add(halves.view(np.float32), power.view(np.float32), halves.view(np.float32))
        np.right_shift(power, _13, power)
        np.add(halves, power, halves)
        np.bitwise_and(bits, _SIGN, power)
        np.right_shift(power, _16, power)
        np.add(halves, power, halves)
        out.view(np.uint16)[:] = halves  # its lower 16 bits

    def _narrow_by_numpy(self, source: Array, out: Array) -> None:
        self._note_overflow(source)
        np.copyto(out, source, casting="unsafe")

    def _note_overflow(self, source: Array) -> None:
        magnitudes = np.abs(source)
        overflowing = (magnitudes >= 65520) & (magnitudes < np.inf)
        self.overflow = max(self.overflow, float(magnitudes.max(where=overflowing, initial=0)))

    def _widen(self, source: Array, out: Array) -> None:
        indices = self._indices[: source.size]
        indices[:] = source.view(np.uint16)
        # Modes other than "raise" write to `out` directly.
        self._all_halves.take(indices, out=out, mode="wrap")

    @functools.cached_property
    def _sums(self) -> NDArray[np.float32]:
        return np.empty((2, _BLOCK), np.float32)

    @functools.cached_property
    def _scratch(self) -> NDArray[np.uint32]:
        return np.empty((2, _BLOCK), np.uint32)

    @functools.cached_property
    def _indices(self) -> NDArray[np.intp]:
        return np.empty(_BLOCK, np.intp)

    @functools.cached_property
    def _all_halves(self) -> NDArray[np.float32]:
        """Every float16 value as float32, at the index given by its bits."""
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def divide(array: Array, divisor: int) -> None:
    """Divide the elements of ``array`` in place."""
    if divisor > 1:
        operate, operand = division(divisor, array.dtype)
        operate(array, operand, array)


@functools.lru_cache(64)
def division(divisor: int, dtype: Dtype) -> tuple[np.ufunc, Array]:
    """Return the fastest operation that divides by ``divisor``, and its second operand."""
    if divisor & (divisor - 1) == 0:  # a power of two, whose reciprocal is exact
        return np.multiply, np.array(1 / divisor, dtype)
    return np.divide, np.array(divisor, dtype)
