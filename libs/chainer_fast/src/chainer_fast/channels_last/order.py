"""The order in which the elements of arrays lie in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


def lie_alike(arrays: Sequence[Any]) -> bool:
    """Return whether arrays lie in memory without gaps, all in the same order of axes."""
    if all(array.flags.c_contiguous for array in arrays):
        return True
    orders = {_order_of(array) for array in arrays}
    return len(orders) == 1 and None not in orders


def memory_of(array: Any) -> Any:
    """Return a view of shape (n,) of an array without gaps, in the order of memory."""
    if array.flags.c_contiguous:
        return array.ravel()
    order = _order_of(array) or ()
    return array.transpose(*order, *(k for k in range(array.ndim) if k not in order)).ravel()


def brought(xp: Any, array: Any, like: Any) -> Any:
    """Return an array, or a copy of it that lies in memory as another array does."""
    if lie_alike([array, like]):
        return array
    copy = xp.empty_like(like, dtype=array.dtype)
    copy[...] = array
    return copy


def _order_of(array: Any) -> tuple[int, ...] | None:
    return _order(array.shape, array.strides, array.itemsize)


@functools.lru_cache(1 << 12)
def _order(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...] | None:
    """Return the axes longer than 1 from the largest steps to the smallest; None with gaps."""
    axes = sorted((k for k, n in enumerate(shape) if n > 1), key=strides.__getitem__, reverse=True)
    step = itemsize
    for k in reversed(axes):
        if strides[k] != step:
            return None
        step *= shape[k]
    return tuple(axes)
