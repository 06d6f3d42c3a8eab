"""``dropout``, with the same random numbers as Chainer without iDeep."""

from __future__ import annotations

from typing import Any

import numpy

from chainer_fast.ideep4py.arrays import mdarray


def Forward(x: mdarray, ratio: float) -> tuple[numpy.ndarray, Any]:
    """Return the mask and its product with ``x``."""
    scale = numpy.float32(1.0 / (1 - ratio))
    mask = scale * (numpy.random.rand(*x.shape) >= ratio)
    return mask, x * mask


def Backward(mask: mdarray, gy: mdarray) -> Any:
    """Return the gradient of ``x``."""
    return gy * mask
