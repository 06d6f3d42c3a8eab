"""Sums of the arrays of several ranks, in the order of the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chainermn.transport.host.casts import Casts
from chainermn.transport.reducer import Array

# Elements per block. Together with the scratch memory, a block fits in the second-level cache.
_BLOCK = 1 << 15


class Adder(Casts):
    """Sums and copies arrays. For one thread at a time."""

    @np.errstate(all="ignore")  # a warning turned into an error would stop only one rank
    def add_up(self, parts: Sequence[Array], out: Array, divisor: int = 1) -> None:
        """Sum at least two arrays, in turn, and divide the sum by ``divisor``.

        All have the same length and dtype. Elements of 16 bits are summed and divided in float32,
        then rounded. ``out`` may be one of the first two of ``parts``; if the elements have 16
        bits, any of them.
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

    def _add_up_in_float32(self, parts: Sequence[Array], out: Array, divisor: int) -> None:
        total, addend = self._sums[:, : out.size]
        self.copy(parts[0], total)
        for part in parts[1:]:
            self.copy(part, addend)
            np.add(total, addend, total)
        divide(total, divisor)
        self.copy(total, out)

    @functools.cached_property
    def _sums(self) -> NDArray[np.float32]:
        return np.empty((2, _BLOCK), np.float32)


def divide(array: Array, divisor: int) -> None:
    """Divide the elements of ``array`` in place."""
    if divisor > 1:
        operate, operand = division(divisor, array.dtype)
        operate(array, operand, array)


@functools.lru_cache(64)
def division(divisor: int, dtype: np.dtype[Any]) -> tuple[np.ufunc, Array]:
    """Return the fastest operation that divides by ``divisor``, and its second operand."""
    if divisor & (divisor - 1) == 0:  # a power of two, whose reciprocal is exact
        return np.multiply, np.array(1 / divisor, dtype)
    return np.divide, np.array(divisor, dtype)
