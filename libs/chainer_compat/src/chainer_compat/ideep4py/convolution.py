"""``convolution2D``: convolutions of images, and both of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from chainer_compat.ideep4py.arrays import mdarray, result
from chainer_compat.onednn import operations
from chainer_compat.onednn.operations import Window
from chainer_compat.onednn.primitives import Arg


@dataclass(frozen=True)
class convolution2DParam:
    """The shape of what is computed, and how the window moves."""

    out_shape: tuple[int, int, int, int]
    dy: int
    dx: int
    sy: int
    sx: int
    ph: int
    pw: int
    pd: int
    pr: int

    @property
    def window(self) -> Window:
        """The same in oneDNN's words."""
        return Window(
            (self.sy, self.sx), (self.dy, self.dx), (self.ph, self.pw), (self.pd, self.pr)
        )


def Forward(
    x: mdarray, W: mdarray, b: mdarray | None, param: convolution2DParam
) -> numpy.ndarray | mdarray:
    """Return the convolution of ``x`` with ``W``, plus ``b``."""
    primitive = operations.convolution(
        x.shape, W.shape, tuple(param.out_shape), b is not None, param.window
    )
    operands = {Arg.SRC: x.tensor, Arg.WEIGHTS: W.tensor}
    if b is not None:
        operands[Arg.BIAS] = b.tensor
    return result(*primitive.run(operands))


def BackwardData(W: mdarray, gy: mdarray, param: convolution2DParam) -> Any:
    """Return the gradient of ``x``; also the transposed convolution of ``gy``."""
    primitive = operations.convolution_backward_data(
        tuple(param.out_shape), W.shape, gy.shape, param.window
    )
    return result(*primitive.run({Arg.WEIGHTS: W.tensor, Arg.DIFF_DST: gy.tensor}))


def BackwardWeights(x: mdarray, gy: mdarray, param: convolution2DParam) -> numpy.ndarray:
    """Return the gradient of ``W``: a NumPy array, as others than oneDNN read it next."""
    primitive = operations.convolution_backward_weights(
        x.shape, tuple(param.out_shape), gy.shape, param.window
    )
    (gW,) = primitive.run({Arg.SRC: x.tensor, Arg.DIFF_DST: gy.tensor})
    return gW.as_array()
