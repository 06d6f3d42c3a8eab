"""``batchNormalization`` of images, by channel."""

from __future__ import annotations

from typing import Any

import numpy

from chainer_compat.ideep4py.arrays import array, mdarray, result
from chainer_compat.onednn import operations
from chainer_compat.onednn.primitives import Arg, Tensor


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
        The result; without given statistics also the mean, the variance, and 1 over the standard
        deviation, each by channel.
    """
    source = x.tensor
    operands = {Arg.SRC: source, Arg.SCALE: gamma.tensor, Arg.SHIFT: beta.tensor}
    if mean is not None and var is not None:
        operands |= {Arg.MEAN: mean.tensor, Arg.VARIANCE: var.tensor}
        primitive = operations.fixed_batch_normalization(source.layout, eps)
        return (result(*primitive.run(operands)),)
    primitive = operations.batch_normalization(source.layout, eps)
    y, found_mean, found_var = primitive.run(operands)
    inv_std = numpy.reciprocal(numpy.sqrt(found_var.buffer + numpy.float32(eps)))
    return result(y), found_mean.as_array(), found_var.as_array(), inv_std


def Backward(
    x: mdarray, gy: mdarray, mean: Any, var: Any, gamma: mdarray, eps: float
) -> tuple[Any, tuple[numpy.ndarray, numpy.ndarray]]:
    """Return the gradients of ``x``, and of gamma and beta."""
    source = x.tensor
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
