"""Kernels for float16 images that lie channels last; ``kernels.cu`` has their source.

They move 16 bytes at a time if the number of channels is a multiple of 8. Other numbers of
channels are slower.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

from chainer_fast.channels_last import layout

#: Largest number of pixels in a window of `Kernels.max_pool`.
MOST_PLACES = 255
#: Place of a maximum that is -inf or NaN, unless its window has the first pixel of the image.
NOWHERE = 255
_MOST_ELEMENTS = 2**31 - 1
_THREADS, _MOST_IN_Y = 256, 65535
# Eight blocks for each multiprocessor of an H200, if each has enough rows to sum.
_MOST_BLOCKS, _FEWEST_ROWS = 8 * 132, 16

# The structure Windows: CuPy passes an array in host memory by value if it has one element.
_WINDOWS = numpy.dtype("V48")

Pair = tuple[int, int]
_int = numpy.int32


def takes(array: Any) -> bool:
    """Return whether an array can be given to `Kernels`."""
    return layout.is_kept(array) and array.size <= _MOST_ELEMENTS


class Kernels:
    """Functions of channels-last float16 arrays with fewer than 2**31 elements.

    Parameters
    ----------
    cupy
        The module CuPy.
    """

    def __init__(self, cupy: ModuleType | Any) -> None:
        self._cupy = cupy
        self._kernel = functools.cache(self._make)
        self._source = Path(__file__).with_name("kernels.cu").read_text("utf-8")

    def add_bias(self, y: Any, bias: Any) -> None:
        """Add a number to each channel, in place."""
        # As Chainer's own code, this raises if the number of channels is another.
        bias = self._cupy.broadcast_to(bias, y.shape[1:2])
        bias = self._cupy.ascontiguousarray(bias)
        lanes = _lanes(y.shape[1], y, bias)
        n, packs = y.size // lanes, y.shape[1] // lanes
        self._launch("add_bias", lanes, n, 1, y, bias, _int(n), _int(packs))

    def sum_by_channel(self, x: Any) -> Any:
        """Return the sum of each channel. Its additions are of float32, always in one order."""
        channels = x.shape[1]
        lanes = _lanes(channels, x)
        rows, packs = x.size // channels, channels // lanes
        rows_at_once = max(1, _THREADS // packs)
        blocks = min(_MOST_BLOCKS, -(-rows // (rows_at_once * _FEWEST_ROWS)))
        sums = self._cupy.empty((blocks, channels), numpy.float32)
        y = self._cupy.empty(channels, x.dtype)
        self._kernel("sum_rows", lanes)(
            (blocks, -(-packs // _THREADS)), (_THREADS,), (x, sums, _int(rows), _int(packs))
        )
        self._kernel("sum_sums", lanes)(
            (-(-channels // 32),), (32, 32), (sums, y, _int(blocks), _int(channels))
        )
        return y

    def padded(self, x: Any, n_channels: int) -> Any:
        """Return a channels-last copy of images in any order, with more channels: zeros."""
        if not (x.flags.c_contiguous or layout.is_channels_last(x)):
            x = self._cupy.ascontiguousarray(x)
        n, channels, height, width = x.shape
        y = layout.empty(self._cupy, (n, n_channels, height, width), x.dtype)
        lanes, pixels = _lanes(n_channels, y), height * width
        steps = (pixels, 1) if x.flags.c_contiguous else (1, channels)
        numbers = map(_int, (n, channels, pixels, n_channels // lanes, *steps))
        self._launch("pad", lanes, y[0].size // lanes, n, x, y, *numbers)
        return y

    def max_pool(
        self, x: Any, ksize: Pair, stride: Pair, pad: Pair, outs: Pair
    ) -> tuple[Any, Any]:
        """Return the maxima of windows, and their places in the windows.

        Parameters
        ----------
        x
            Images.
        ksize, stride, pad
            Sizes by rows and columns. A window has at most `MOST_PLACES` pixels.
        outs
            Rows and columns of the result.

        Returns
        -------
        tuple of two arrays
            Maxima, and places as uint8. As in Chainer's kernel, no number is greater than NaN:
            see `NOWHERE`.
        """
        shape = (*x.shape[:2], *outs)
        y = layout.empty(self._cupy, shape, x.dtype)
        places = layout.empty(self._cupy, shape, numpy.uint8)
        self._pool("max_pool", y, x, y, (x, y, places), ksize, stride, pad)
        return y, places

    def max_pool_gradient(
        self, gy: Any, places: Any, ksize: Pair, stride: Pair, pad: Pair, shape: Sequence[int]
    ) -> Any:
        """Return the gradient of `max_pool` for images of a shape."""
        gx = layout.empty(self._cupy, tuple(shape), gy.dtype)
        self._pool("max_pool_gradient", gx, gx, gy, (gy, places, gx), ksize, stride, pad)
        return gx

    def average_pool(self, x: Any, ksize: Pair, stride: Pair, pad: Pair, outs: Pair) -> Any:
        """Return the means of windows, in which pixels of the padding are zero.

        The parameters are those of `max_pool`; windows may be of any size.
        """
        y = layout.empty(self._cupy, (*x.shape[:2], *outs), x.dtype)
        self._pool("average_pool", y, x, y, (x, y), ksize, stride, pad)
        return y

    def average_pool_gradient(
        self, gy: Any, ksize: Pair, stride: Pair, pad: Pair, shape: Sequence[int]
    ) -> Any:
        """Return the gradient of `average_pool` for images of a shape."""
        gx = layout.empty(self._cupy, tuple(shape), gy.dtype)
        self._pool("average_pool_gradient", gx, gx, gy, (gy, gx), ksize, stride, pad)
        return gx

    def _pool(
        self, name: str, made: Any, x: Any, y: Any, arrays: tuple[Any, ...], *geometry: Pair
    ) -> None:
        """Launch a kernel with one thread for each pack of the array that it makes."""
        n, channels = x.shape[:2]
        lanes = _lanes(channels, *arrays)
        sizes = [(n, channels // lanes), x.shape[2:], y.shape[2:], *geometry]
        windows = numpy.array(sizes, _int).ravel().view(_WINDOWS)
        self._launch(name, lanes, math.prod(made.shape[1:]) // lanes, n, *arrays, windows)

    def _launch(self, name: str, lanes: int, n: int, images: int, *args: Any) -> None:
        if n:
            grid = (-(-n // _THREADS), min(images, _MOST_IN_Y))
            self._kernel(name, lanes)(grid, (_THREADS,), args)

    def _make(self, name: str, lanes: int) -> Any:
        # CuPy compiles a source once for all of its kernels.
        options = ("-std=c++17", f"-DLANES={lanes}", f"-DTHREADS={_THREADS}")
        return self._cupy.RawKernel(self._source, name, options)


@functools.cache
def the_kernels() -> Kernels:
    """Return the kernels of this process. The first launch of one compiles it."""
    return Kernels(importlib.import_module("cupy"))


def _lanes(channels: int, *arrays: Any) -> int:
    """Return how many channels a thread can move at once."""
    for lanes in (8, 4):
        if channels % lanes == 0 and all(
            array.data.ptr % (lanes * array.dtype.itemsize) == 0 for array in arrays
        ):
            return lanes
    return 1
