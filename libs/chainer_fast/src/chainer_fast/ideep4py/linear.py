"""``linear``: a fully connected layer."""

from __future__ import annotations

import numpy

from chainer_fast.ideep4py.arrays import mdarray
from chainer_fast.onednn.matrices import product


def Forward(x: mdarray, W: mdarray, b: mdarray | None = None) -> numpy.ndarray:
    """Return ``x W^T + b``."""
    y = product(numpy.asarray(x), numpy.asarray(W).T)
    if b is not None:
        y += numpy.asarray(b)
    return y


def BackwardData(W: mdarray, gy: mdarray) -> numpy.ndarray:
    """Return the gradient of ``x``."""
    return product(numpy.asarray(gy), numpy.asarray(W))


def BackwardWeights(x: mdarray, gy: mdarray) -> numpy.ndarray:
    """Return the gradient of ``W``."""
    return product(numpy.asarray(gy).T, numpy.asarray(x))
