"""Pool and sum float16 images that lie channels last by kernels of this package.

Chainer's copy such images to another order, or use few threads. All other calls go to them.
"""

import functools
import importlib
import math
from types import ModuleType
from typing import Any

from chainer_compat import surgery
from chainer_fast.channels_last import layout
from chainer_fast.channels_last.kernels import MOST_PLACES, NOWHERE, Pair, takes, the_kernels

_ALL_BUT_CHANNELS = [0, 2, 3]


def reduce_by_kernels(functions: ModuleType) -> None:
    """Change Chainer's classes for pooling and sums."""
    name = functions.__name__
    max_pool(importlib.import_module(f"{name}.pooling.max_pooling_nd"))
    for owner in ("AveragePooling2D", "AveragePoolingND"):
        module = f"average_pooling_{owner[-2:].lower()}"
        average_pool(importlib.import_module(f"{name}.pooling.{module}"), owner)
    sum_by_channel(importlib.import_module(f"{name}.math.sum"))


def max_pool(module: ModuleType) -> None:
    """Let max pooling and its gradient give channels-last arrays if they get them."""
    pooling, gradient = module.MaxPoolingND, module.MaxPoolingNDGrad
    forward, backward = pooling.forward_gpu, gradient.forward_gpu
    # Places of the maxima in one byte each. Whoever wants Chainer's indexes makes them from these.
    pooling.places = None
    pooling.indexes = functools.cached_property(lambda self: _indexes(module.cuda.cupy, self))
    pooling.indexes.__set_name__(pooling, "indexes")

    @surgery.replaces(pooling, "forward_gpu")
    def forward_gpu(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = inputs
        if not takes(x) or math.prod(self.ksize) > MOST_PLACES:
            return forward(self, inputs)
        self._in_shape, self._in_dtype = x.shape, x.dtype
        y, self.places = the_kernels().max_pool(x, *_windows(self), _outs(module, self, x))
        return (y,)

    @surgery.replaces(gradient, "forward_gpu")
    def gradient_gpu(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (gy,) = inputs
        f = self.func
        if f.places is None or gy.dtype != f._in_dtype:
            return backward(self, inputs)
        gy = layout.converted(module.cuda.cupy, gy)
        return (the_kernels().max_pool_gradient(gy, f.places, *_windows(f), f._in_shape),)


def average_pool(module: ModuleType, name: str) -> None:
    """Let a class for average pooling, and its gradient, give channels-last arrays too."""
    pooling, gradient = getattr(module, name), getattr(module, f"{name}Grad")
    forward, backward = pooling.forward_gpu, gradient.forward_gpu
    pooling.is_channels_last = False

    @surgery.replaces(pooling, "forward_gpu")
    def forward_gpu(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = inputs
        if not takes(x) or getattr(self, "pad_value", 0) is None:
            return forward(self, inputs)
        self._in_shape, self._in_dtype, self.is_channels_last = x.shape, x.dtype, True
        return (the_kernels().average_pool(x, *_windows(self), _outs(module, self, x)),)

    @surgery.replaces(gradient, "forward_gpu")
    def gradient_gpu(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (gy,) = inputs
        f = self.apool2d if hasattr(self, "apool2d") else self.func
        if not f.is_channels_last or gy.dtype != f._in_dtype:
            return backward(self, inputs)
        gy = layout.converted(module.cuda.cupy, gy)
        return (the_kernels().average_pool_gradient(gy, *_windows(f), f._in_shape),)


def sum_by_channel(module: ModuleType) -> None:
    """Let images be summed over all axes except the channels, as for the gradient of a bias."""
    original = module.Sum.forward
    cuda = importlib.import_module("chainer.backends.cuda")

    @surgery.replaces(module.Sum, "forward")
    def forward(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = inputs
        if (
            type(x) is not cuda.ndarray
            or self.axis is None
            or not takes(x)
            or sorted(axis + 4 * (axis < 0) for axis in self.axis) != _ALL_BUT_CHANNELS
        ):
            return original(self, inputs)
        sums = the_kernels().sum_by_channel(x)
        return (sums.reshape(1, -1, 1, 1) if self.keepdims else sums,)


def _windows(f: Any) -> tuple[Pair, Pair, Pair]:
    """Return size, stride and padding by rows and columns. The caller's may be NumPy's."""
    if hasattr(f, "ksize"):
        found = f.ksize, f.stride, f.pad
    else:
        found = (f.kh, f.kw), (f.sy, f.sx), (f.ph, f.pw)
    size, stride, pad = ((int(rows), int(columns)) for rows, columns in found)
    return size, stride, pad


def _outs(module: ModuleType, function: Any, x: Any) -> Pair:
    """Return rows and columns of the result."""
    conv = getattr(module, "conv", None) or module.conv_nd
    sizes = zip(x.shape[2:], *_windows(function), strict=True)
    rows, columns = (conv.get_conv_outsize(*each, function.cover_all) for each in sizes)
    return rows, columns


def _indexes(xp: Any, function: Any) -> Any:
    """Return the places of maxima as Chainer's kernel does, which others read."""
    places = function.places
    if places is None:
        raise AttributeError("MaxPoolingND has no indexes before it has pooled")
    (_, columns), stride, pad = _windows(function)
    # Chainer's place of the first pixel of the image, counted from each window.
    y, x = (p - s * xp.arange(n) for p, s, n in zip(pad, stride, places.shape[2:], strict=True))
    first = (y[:, None] * columns + x).astype("i")
    return xp.where(places == NOWHERE, first, places)
