"""``relu``: the rectifier, plain or leaky."""

from __future__ import annotations

import functools
from typing import Any

import numpy

from chainer_fast.ideep4py.arrays import mdarray, result
from chainer_fast.onednn import operations
from chainer_fast.onednn.layouts import plain
from chainer_fast.onednn.primitives import Arg, Tensor

_CHUNK = 1 << 18  # elements


def Forward(x: mdarray, slope: float = 0.0) -> Any:
    """Return ``x`` where it is positive and ``slope * x`` elsewhere; NaN stays NaN."""
    source = x.tensor
    if slope == 0:
        return result(Tensor(source.layout, _maximum_with_zero(source.buffer)))
    return result(*operations.relu(source.layout, slope).run({Arg.SRC: source}))


def Backward(cond: mdarray, gy: mdarray, slope: float = 0.0) -> Any:
    """Return ``gy`` where ``cond`` is positive and ``slope * gy`` elsewhere."""
    source = cond.tensor
    primitive = operations.relu_backward(source.layout, slope)
    return result(*primitive.run({Arg.SRC: source, Arg.DIFF_DST: gy.tensor}))


def _maximum_with_zero(x: numpy.ndarray) -> numpy.ndarray:
    """Return the maximum of each element and 0, or NaN for NaN.

    oneDNN's rectifier turns NaN into 0, which would hide that training has diverged. Its maximum
    of two arrays does not. One chunk of zeros is enough for all.
    """
    y = numpy.empty_like(x)
    zeros = _zeros()
    whole = x.size - x.size % _CHUNK
    if whole:
        layout = plain((_CHUNK,))
        primitive = operations.maximum(layout)
        operands = {Arg.SRC: Tensor(layout, zeros)}
        for start in range(0, whole, _CHUNK):
            stop = start + _CHUNK
            operands[Arg.SRC_1] = Tensor(layout, x[start:stop])
            primitive.run(operands, [Tensor(layout, y[start:stop])])
    numpy.maximum(x[whole:], zeros[: x.size - whole], out=y[whole:])
    return y


@functools.cache
def _zeros() -> numpy.ndarray:
    return numpy.zeros(_CHUNK, numpy.float32)
