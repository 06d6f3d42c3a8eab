"""The functions to measure one by one, in Chainer and in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A function on arrays of some shapes.

    Attributes
    ----------
    kind : str
    shapes : tuple of tuples of int
    options : dict
    is_first : bool
        Whether it is the first layer of a network, which needs no gradient of its input.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)
    is_first: bool = False


def _convolution(x: tuple[int, ...], n_out: int, size: int, **options: int) -> Case:
    shapes = x, (n_out, x[1], size, size), (n_out,)
    return Case("convolution", shapes, options, is_first=x[1] <= 3)


def _linear(n: int, n_in: int, n_out: int) -> Case:
    return Case("linear", ((n, n_in), (n_out, n_in), (n_out,)))


_WIDE, _DEEP = (2, 256, 56, 56), (2, 512, 7, 7)

#: Cases by name. The sizes are those of the measured networks and of the apps.
CASES = {
    "convolution 7x7, stride 2, 3 to 64 channels": _convolution(
        (2, 3, 224, 224), 64, 7, stride=2, pad=3
    ),
    "convolution 3x3, 64 to 128 channels": _convolution((8, 64, 32, 32), 128, 3, pad=1),
    "convolution 3x3, 512 to 512 channels": _convolution(_DEEP, 512, 3, pad=1),
    "convolution 1x1, 256 to 64 channels": _convolution(_WIDE, 64, 1),
    "convolution 3x3, 1 to 16 channels, digits": _convolution((100, 1, 28, 28), 16, 3, pad=1),
    "deconvolution 4x4, stride 2, 256 to 128 channels": Case(
        "deconvolution", ((8, 256, 8, 8), (256, 128, 4, 4), (128,)), {"stride": 2, "pad": 1}
    ),
    "linear 784 to 1000, batch 100": _linear(100, 784, 1000),
    "linear 2048 to 2048, batch 8": _linear(8, 2048, 2048),
    "linear 1000 to 10, batch 100": _linear(100, 1000, 10),
    "batch normalization, 56x56": Case("batch normalization", (_WIDE, (256,), (256,))),
    "batch normalization, 7x7": Case("batch normalization", (_DEEP, (512,), (512,))),
    "batch normalization, vectors": Case("batch normalization", ((100, 1000), (1000,), (1000,))),
    "relu, 56x56": Case("relu", (_WIDE,)),
    "relu, vectors": Case("relu", ((100, 1000),)),
    "leaky relu, 56x56": Case("leaky relu", (_WIDE,), {"slope": 0.2}),
    "sigmoid, 56x56": Case("sigmoid", (_WIDE,)),
    "max pooling 2": Case("max pooling", ((8, 64, 64, 64),), {"ksize": 2}),
    "max pooling 3, stride 2": Case(
        "max pooling", ((2, 64, 112, 112),), {"ksize": 3, "stride": 2, "cover_all": False}
    ),
    "average pooling 7": Case("average pooling", ((2, 2048, 7, 7),), {"ksize": 7}),
    "local response normalization": Case(
        "local response normalization", ((8, 96, 27, 27),), {"alpha": 1e-4}
    ),
    "dropout": Case("dropout", ((100, 1000),)),
    "add, 56x56": Case("add", (_WIDE, _WIDE)),
    "concat, 28x28": Case("concat", ((2, 64, 28, 28),) * 4),
}
