"""``convolution2D``: convolutions of images, and both gradients."""

from __future__ import annotations

from typing import Any

import numpy

from chainer_fast.ideep4py.arrays import mdarray, result
from chainer_fast.ideep4py.windows import WindowParam
from chainer_fast.onednn import operations
from chainer_fast.onednn.operations import Window
from chainer_fast.onednn.primitives import Arg


class convolution2DParam(WindowParam):
    """Parameters of a convolution, including the dilations."""

    @property
    def window(self) -> Window:
        """Movement of the window, in oneDNN's terms."""
        return self.moving((self.y, self.x))


def Forward(
    x: mdarray, W: mdarray, b: mdarray | None, param: convolution2DParam
) -> numpy.ndarray | mdarray:
    """Return the convolution of ``x`` with ``W``, plus ``b``."""
    primitive = operations.convolution(
        x.shape, W.shape, param.out_shape, b is not None, param.window
    )
    operands = {Arg.SRC: x.tensor, Arg.WEIGHTS: W.tensor}
    if b is not None:
        operands[Arg.BIAS] = b.tensor
    return result(*primitive.run(operands))


def BackwardData(W: mdarray, gy: mdarray, param: convolution2DParam) -> Any:
    """Return the gradient of ``x``; also the transposed convolution of ``gy``."""
    primitive = operations.convolution_backward_data(
        param.out_shape, W.shape, gy.shape, param.window
    )
    return result(*primitive.run({Arg.WEIGHTS: W.tensor, Arg.DIFF_DST: gy.tensor}))


def BackwardWeights(x: mdarray, gy: mdarray, param: convolution2DParam) -> numpy.ndarray:
    """Return the gradient of ``W`` as a NumPy array, because oneDNN is not the next to read it."""
    primitive = operations.convolution_backward_weights(
        x.shape, param.out_shape, gy.shape, param.window
    )
    (gW,) = primitive.run({Arg.SRC: x.tensor, Arg.DIFF_DST: gy.tensor})
    return gW.as_array()
