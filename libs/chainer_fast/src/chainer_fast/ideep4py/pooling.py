"""``pooling2D``: the maximum or the average over windows of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy

from chainer_fast.ideep4py.arrays import mdarray, result
from chainer_fast.ideep4py.windows import WindowParam
from chainer_fast.onednn import operations
from chainer_fast.onednn.operations import Window
from chainer_fast.onednn.primitives import Arg


@dataclass(frozen=True)
class pooling2DParam(WindowParam):
    """Parameters of a pooling, including the size of the window and the kind."""

    kind: int

    pooling_max: ClassVar[int] = operations.MAX_POOLING
    pooling_avg_include_padding: ClassVar[int] = operations.AVERAGE_POOLING

    @property
    def window(self) -> Window:
        """Movement of the window, in oneDNN's terms."""
        return self.moving((1, 1))

    @property
    def kernel(self) -> tuple[int, int]:
        """Height and width of the window."""
        return self.y, self.x


def Forward(x: mdarray, param: pooling2DParam) -> tuple[Any, ...]:
    """Return the result and, for max pooling, the place of each maximum in its window."""
    source = x.tensor
    primitive = operations.pooling(
        param.kind, source.layout, param.out_shape, param.kernel, param.window
    )
    y, *indexes = primitive.run({Arg.SRC: source})
    if param.kind == param.pooling_max and (param.pd >= param.y or param.pr >= param.x):
        # oneDNN's maximum of an empty window is the lowest finite number, Chainer's -inf.
        array = y.as_array()
        array[array == numpy.finfo(numpy.float32).min] = -numpy.inf
        return (array, *map(mdarray, indexes))
    return (result(y), *map(mdarray, indexes))


def Backward(x: mdarray, gy: mdarray, indexes: mdarray | None, param: pooling2DParam) -> Any:
    """Return the gradient of ``x``."""
    operands = {Arg.DIFF_DST: gy.tensor}
    if indexes is not None:
        operands[Arg.WORKSPACE] = indexes.tensor
    primitive = operations.pooling_backward(
        param.kind, x.tensor.layout, gy.shape, param.kernel, param.window
    )
    return result(*primitive.run(operands))
