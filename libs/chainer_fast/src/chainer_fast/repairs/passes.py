"""Avoid copies that Chainer makes with NumPy and does not need.

The results are bitwise identical, except for the sign of zeros.
"""

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy

from chainer_compat import surgery


def copies_are_made() -> bool:
    return True


def pool_in_place(module: ModuleType) -> None:
    """Take the maximum of windows without copying the image for each place in a window."""
    pooling, gradient = module.MaxPoolingND, module.MaxPoolingNDGrad
    forward_cpu, gradient_cpu = pooling.forward_cpu, gradient.forward_cpu

    @surgery.replaces(pooling, "forward_cpu")
    def forward(self: Any, inputs: Any) -> Any:
        (x,) = inputs
        is_onednns = self.ndim == 2 and _asks_onednn(module, inputs)
        if is_onednns or not isinstance(x, numpy.ndarray):
            return forward_cpu(self, inputs)
        outs = [
            module.conv_nd.get_conv_outsize(*each, self.cover_all)
            for each in zip(x.shape[2:], self.ksize, self.stride, self.pad, strict=True)
        ]
        y, indexes = _pool(x, self.ksize, self.stride, self.pad, outs)
        if indexes is None:
            return forward_cpu(self, inputs)
        self._in_shape, self._in_dtype, self.indexes = x.shape, x.dtype, indexes
        return (y,)

    @surgery.replaces(gradient, "forward_cpu")
    def backward(self: Any, inputs: Any) -> Any:
        (gy,) = inputs
        f = self.func
        if (
            (f.ndim == 2 and _asks_onednn(module, inputs))
            or not (isinstance(gy, numpy.ndarray) and isinstance(f.indexes, numpy.ndarray))
            or gy.dtype != f._in_dtype
            or numpy.prod(f.ksize) > 255
        ):
            return gradient_cpu(self, inputs)
        return (_unpool(gy, f.indexes, f._in_shape, f.ksize, f.stride, f.pad),)


def _pool(
    x: numpy.ndarray,
    ksize: Sequence[int],
    stride: Sequence[int],
    pad: Sequence[int],
    outs: Sequence[int],
) -> tuple[Any, Any]:
    """Return the maxima and their places in the windows; None in difficult cases."""
    if min(outs) <= 0 or x.size == 0 or numpy.prod(ksize) > 255:
        return None, None
    reached = [s * (n - 1) + k for s, n, k in zip(stride, outs, ksize, strict=True)]
    if any(pad) or any(n > d for n, d in zip(reached, x.shape[2:], strict=True)):
        lengths = [max(n, p + d) for n, p, d in zip(reached, pad, x.shape[2:], strict=True)]
        padded = numpy.full((*x.shape[:2], *lengths), -numpy.inf, x.dtype)
        padded[_inside(pad, x.shape)] = x
        x = padded
    places = _places(ksize, stride, outs)
    y = x[next(places)].copy()
    indexes = numpy.zeros(y.shape, numpy.uint8)
    is_greater = numpy.empty(y.shape, bool)
    for number, place in enumerate(places, 1):
        values = x[place]
        numpy.greater(values, y, out=is_greater)
        # The last place where the maximum grows is the first place of the maximum.
        found = is_greater.view(numpy.uint8) * numpy.uint8(number)
        numpy.maximum(indexes, found, out=indexes)
        numpy.maximum(y, values, out=y)
    if numpy.isnan(y).any():
        return None, None
    return y, indexes.astype(numpy.intp)


def _unpool(
    gy: numpy.ndarray,
    indexes: numpy.ndarray,
    shape: Sequence[int],
    ksize: Sequence[int],
    stride: Sequence[int],
    pad: Sequence[int],
) -> numpy.ndarray:
    """Return the gradients at the places of the maxima, 0 elsewhere."""
    lengths = [d + 2 * p + s - 1 for d, p, s in zip(shape[2:], pad, stride, strict=True)]
    gx = numpy.zeros((*shape[:2], *lengths), gy.dtype)
    indexes = indexes.astype(numpy.uint8)
    # Multiply bit patterns, because infinity times 0 is not 0.
    bits = numpy.ascontiguousarray(gy).view(f"u{gy.itemsize}")
    for number, place in enumerate(_places(ksize, stride, gy.shape[2:])):
        chosen = bits * (indexes == numpy.uint8(number)).astype(bits.dtype)
        gx[place] += chosen.view(gy.dtype)
    return gx[_inside(pad, shape)]


def _places(
    ksize: Sequence[int], stride: Sequence[int], outs: Sequence[int]
) -> Iterator[tuple[Any, ...]]:
    """Yield, for each place in a window, the index of that place in all windows."""
    for place in itertools.product(*map(range, ksize)):
        moves = zip(place, stride, outs, strict=True)
        yield (..., *(slice(k, k + s * (n - 1) + 1, s) for k, s, n in moves))


def _inside(pad: Sequence[int], shape: Sequence[int]) -> tuple[Any, ...]:
    return (..., *(slice(p, p + d) for p, d in zip(pad, shape[2:], strict=True)))


def multiply_once(module: ModuleType) -> None:
    """Multiply by the slope of a leaky rectifier without gathering negative elements."""
    rectifier, gradient = module.LeakyReLU, module._LeakyReLUGrad
    forward_cpu, gradient_cpu = rectifier.forward_cpu, gradient.forward_cpu

    @surgery.replaces(rectifier, "forward_cpu")
    def forward(self: Any, inputs: Any) -> Any:
        (x,) = inputs
        if _asks_onednn(module, inputs) or not (
            0 < self.slope <= 1 and isinstance(x, numpy.ndarray)
        ):
            return forward_cpu(self, inputs)
        self.retain_outputs((0,))
        y = x * x.dtype.type(self.slope)
        return (numpy.maximum(x, y, out=numpy.asarray(y)),)

    @surgery.replaces(gradient, "forward_cpu")
    def backward(self: Any, inputs: Any) -> Any:
        (gy,) = inputs
        if _asks_onednn(module, inputs) or not isinstance(gy, numpy.ndarray):
            return gradient_cpu(self, inputs)
        factors = numpy.array([1, self.slope], gy.dtype)
        # NumPy's product of arrays without axes would be a scalar.
        return (numpy.asarray(gy * factors.take(numpy.asarray(self.cond) <= 0)),)


def normalize_in_place(module: ModuleType) -> None:
    """Normalize batches with one array as large as the batch, and compute the mean only once."""
    general = module.GeneralBatchNormalizationImpl
    get_mean_and_var, apply_bn_fwd = general.get_mean_and_var, module._apply_bn_fwd

    @surgery.replaces(general, "get_mean_and_var")
    def mean_and_var(self: Any, axis: Any, gamma: Any, x: Any, xp: Any, dtype: Any) -> Any:
        if not isinstance(x, numpy.ndarray):
            return get_mean_and_var(self, axis, gamma, x, xp, dtype)
        mean = x.mean(axis=axis, dtype=dtype, keepdims=True)
        return mean.squeeze(axis), x.var(axis=axis, dtype=dtype, mean=mean)

    @surgery.replaces(module, "_apply_bn_fwd")
    def apply(xp: Any, x: Any, mean: Any, inv_std: Any, gamma: Any, beta: Any) -> Any:
        if not isinstance(x, numpy.ndarray):
            return apply_bn_fwd(xp, x, mean, inv_std, gamma, beta)
        x_hat = module._x_hat(x, mean, inv_std)
        is_wide = numpy.result_type(x_hat.dtype, gamma.dtype, beta.dtype) == x_hat.dtype
        y = numpy.multiply(x_hat, gamma, out=x_hat if is_wide else None)
        y += beta
        return y.astype(x.dtype, copy=False)


def _asks_onednn(module: ModuleType, arrays: Any) -> bool:
    """Return whether Chainer lets oneDNN compute on arrays."""
    intel64 = module.intel64
    return bool(intel64.should_use_ideep(">=auto") and intel64.inputs_all_ready(arrays))
