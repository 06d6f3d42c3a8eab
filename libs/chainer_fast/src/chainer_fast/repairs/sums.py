"""Sum images that lie channels last, in float16; CuPy's kernel uses few threads for them."""

import importlib
from types import ModuleType
from typing import Any

from chainer_compat import surgery
from chainer_fast.channels_last.kernels import takes, the_kernels

_ALL_BUT_CHANNELS = [0, 2, 3]


def sum_by_channel(module: ModuleType) -> None:
    """Sum channels-last images over all axes except the channels by a kernel of this package.

    Chainer computes the gradient of a convolution's bias this way.
    """
    original = module.Sum.forward
    cuda = importlib.import_module("chainer.backends.cuda")

    @surgery.replaces(module.Sum, "forward")
    def forward(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = inputs
        if (
            type(x) is not cuda.ndarray
            or self.axis is None
            or not takes(x)
            or sorted(axis + 4 * (axis < 0) for axis in self.axis) != _ALL_BUT_CHANNELS
        ):
            return original(self, inputs)
        sums = the_kernels().sum_over_images(x)
        return (sums.reshape(1, -1, 1, 1) if self.keepdims else sums,)
