"""``dropout``, with the random numbers that Chainer takes from NumPy without iDeep."""

from __future__ import annotations

from typing import Any

import numpy

from chainer_compat.ideep4py.arrays import mdarray


def Forward(x: mdarray, ratio: float) -> tuple[numpy.ndarray, Any]:
    """Return what ``x`` is multiplied with, and the product."""
    scale = numpy.float32(1.0 / (1 - ratio))
    mask = scale * (numpy.random.rand(*x.shape) >= ratio)
    return mask, x * mask


def Backward(mask: mdarray, gy: mdarray) -> Any:
    """Return the gradient of ``x``."""
    return gy * mask
