"""What channels last means: strides of (images, rows, columns, channels) under Chainer's shape.

Filters lie so too, with output channels in place of images.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

#: Value of ``chainer.config.compute_mode`` that asks for channels last; Chainer's own name.
MODE = "cudnn_fast"
#: The dtypes that use it, by character: cuDNN computes float32 faster in Chainer's order.
DTYPES = "e"


def is_wanted(dtype: Any) -> bool:
    """Return whether convolutions of a dtype shall give channels-last images.

    Raises
    ------
    ValueError
        If ``compute_mode`` has a value that Chainer does not know.
    """
    if dtype.char not in DTYPES or (mode := _config().compute_mode) is None:
        return False
    if mode != MODE:
        raise ValueError(f"chainer.config.compute_mode must be None or {MODE!r}, got {mode!r}")
    return True


def is_channels_last(array: Any) -> bool:
    """Return whether an array lies channels last, and not in Chainer's order at the same time."""
    return array.ndim == 4 and not array.flags.c_contiguous and as_stored(array).flags.c_contiguous


def is_kept(array: Any) -> bool:
    """Return whether functions of an array shall give channels-last results.

    Convolutions without cuDNN give channels-last arrays in all dtypes, but read others faster.
    """
    return array.dtype.char in DTYPES and is_channels_last(array)


def as_stored(array: Any) -> Any:
    """Return a view with axes in the order of memory, if the array lies channels last."""
    return array.transpose(0, 2, 3, 1)


def as_shaped(stored: Any) -> Any:
    """Return a view with axes in Chainer's order; the inverse of `as_stored`."""
    return stored.transpose(0, 3, 1, 2)


def empty(xp: ModuleType | Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an uninitialized channels-last array of this shape, by ``xp.empty``."""
    n, c, h, w = shape
    return as_shaped(xp.empty((n, h, w, c), dtype))


def converted(xp: ModuleType | Any, array: Any) -> Any:
    """Return an array if it lies channels last, or a copy that does, by ``xp``."""
    if as_stored(array).flags.c_contiguous:
        return array
    return as_shaped(xp.ascontiguousarray(as_stored(array)))


def lie_alike(arrays: Sequence[Any]) -> bool:
    """Return whether all arrays are dense in Chainer's order, or all lie channels last."""
    return all(array.flags.c_contiguous for array in arrays) or all(
        array.ndim == 4 and as_stored(array).flags.c_contiguous for array in arrays
    )


def raveled(array: Any) -> Any:
    """Return a view of shape (n,), in the order of memory, of an array that `lie_alike` takes."""
    return (array if array.flags.c_contiguous else as_stored(array)).ravel()


@functools.cache
def _config() -> Any:
    return importlib.import_module("chainer.configuration").config
