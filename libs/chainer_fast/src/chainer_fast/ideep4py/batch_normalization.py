"""``batchNormalization``: normalize images by channel."""

from __future__ import annotations

from typing import Any

import numpy

from chainer_fast.ideep4py.arrays import array, in_blocks, mdarray, result
from chainer_fast.onednn import operations
from chainer_fast.onednn.primitives import Arg, Tensor


def Forward(
    x: mdarray,
    gamma: mdarray,
    beta: mdarray,
    mean: mdarray | None,
    var: mdarray | None,
    eps: float,
) -> tuple[Any, ...]:
    """Normalize with given statistics, or with those of ``x``.

    Returns
    -------
    tuple of arrays
        The result. Without given statistics, also the mean, the variance, and 1 / standard
        deviation, all by channel.
    """
    if x.shape[2:] == (1, 1):
        return _normalize_vectors(_row(x), _row(gamma), _row(beta), mean, var, eps)
    source = in_blocks(x)
    operands = {Arg.SRC: source, Arg.SCALE: gamma.tensor, Arg.SHIFT: beta.tensor}
    if mean is not None and var is not None:
        operands |= {Arg.MEAN: mean.tensor, Arg.VARIANCE: var.tensor}
        primitive = operations.fixed_batch_normalization(source.layout, eps)
        return (result(*primitive.run(operands)),)
    primitive = operations.batch_normalization(source.layout, eps)
    y, found_mean, found_var = primitive.run(operands)
    inv_std = _inverse_deviation(found_var.buffer, eps)
    return result(y), found_mean.as_array(), found_var.as_array(), inv_std


def Backward(
    x: mdarray, gy: mdarray, mean: Any, var: Any, gamma: mdarray, eps: float
) -> tuple[Any, tuple[numpy.ndarray, numpy.ndarray]]:
    """Return the gradients of ``x`` and of gamma and beta."""
    if x.shape[2:] == (1, 1):
        inv_std = _inverse_deviation(_row(var), eps)
        return _vectors_backward(_row(x), _row(gy), _row(mean), _row(gamma), inv_std)
    source = in_blocks(x)
    operands: dict[Arg, Tensor] = {
        Arg.SRC: source,
        Arg.MEAN: array(mean).tensor,
        Arg.VARIANCE: array(var).tensor,
        Arg.SCALE: gamma.tensor,
        Arg.DIFF_DST: gy.tensor,
    }
    primitive = operations.batch_normalization_backward(source.layout, eps)
    gx, ggamma, gbeta = primitive.run(operands)
    return result(gx), (ggamma.as_array(), gbeta.as_array())


def _normalize_vectors(
    x: numpy.ndarray, gamma: numpy.ndarray, beta: numpy.ndarray, mean: Any, var: Any, eps: float
) -> tuple[numpy.ndarray, ...]:
    """Normalize a batch of vectors, for which oneDNN has no fast primitive."""
    is_given = mean is not None and var is not None
    if not is_given:
        mean = x.mean(axis=0)
    deviation = x - _row(mean)
    if not is_given:
        var = numpy.square(deviation).mean(axis=0)
    inv_std = _inverse_deviation(_row(var), eps)
    deviation *= inv_std
    deviation *= gamma
    deviation += beta
    y = deviation[:, :, None, None]
    return (y,) if is_given else (y, mean, var, inv_std)


def _vectors_backward(
    x: numpy.ndarray,
    gy: numpy.ndarray,
    mean: numpy.ndarray,
    gamma: numpy.ndarray,
    inv_std: numpy.ndarray,
) -> tuple[numpy.ndarray, tuple[numpy.ndarray, numpy.ndarray]]:
    x_hat = (x - mean) * inv_std
    gbeta = gy.sum(axis=0)
    ggamma = (gy * x_hat).sum(axis=0)
    x_hat *= ggamma / numpy.float32(len(x))
    gx = gy - x_hat
    gx -= gbeta / numpy.float32(len(x))
    gx *= gamma * inv_std
    return gx[:, :, None, None], (ggamma, gbeta)


def _row(values: Any) -> numpy.ndarray:
    """Drop the image axes of a batch of vectors, or of values by channel."""
    array = numpy.asarray(values)
    return array.reshape(array.shape[:2])


def _inverse_deviation(var: numpy.ndarray, eps: float) -> numpy.ndarray:
    return numpy.reciprocal(numpy.sqrt(var + numpy.float32(eps)))
