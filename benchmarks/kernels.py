"""The kernels for channels-last images, with the sizes of ResNet-50 and 64 images."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

_PICTURES, _FIRST, _POOLED = (64, 3, 224, 224), (64, 64, 112, 112), (64, 64, 56, 56)
_LAST, _MEANS = (64, 2048, 7, 7), (64, 2048, 1, 1)


@dataclass(frozen=True)
class Case:
    """A method of `chainer_fast.channels_last.kernels.Kernels`.

    Attributes
    ----------
    method : str
    shapes : tuple of tuples of int
        Shapes of the arrays.
    moved : int
        Bytes that the kernel must read and write.
    options : dict
        Other arguments.
    """

    method: str
    shapes: tuple[tuple[int, ...], ...]
    moved: int
    options: dict[str, Any] = field(default_factory=dict)


def _case(method: str, *shapes: tuple[int, ...], moved: float, **options: Any) -> Case:
    """Return a case that moves this many arrays as large as the first, in float16."""
    return Case(method, shapes, round(2 * moved * math.prod(shapes[0])), options)


_WINDOWS = {"ksize": (3, 3), "stride": (2, 2), "pad": (1, 1)}
_WHOLE = {"ksize": (7, 7), "stride": (7, 7), "pad": (0, 0)}
# A quarter of the pixels, and their places of one byte.
_MAXIMA = 1 + (1 + 0.5) / 4

#: Cases by name.
CASES = {
    "bias, 112x112": _case("add_bias", _FIRST, (64,), moved=2),
    "sums by channel, 112x112": _case("sum_by_channel", _FIRST, moved=1),
    "sums by channel, 7x7": _case("sum_by_channel", _LAST, moved=1),
    "3 to 8 channels, 224x224": _case("padded", _PICTURES, moved=1 + 8 / 3, n_channels=8),
    "max pooling": _case("max_pool", _FIRST, moved=_MAXIMA, outs=(56, 56), **_WINDOWS),
    "gradient of max pooling": _case(
        "max_pool_gradient", _FIRST, _POOLED, moved=_MAXIMA, **_WINDOWS
    ),
    "average pooling 7": _case("average_pool", _LAST, moved=1 + 1 / 49, outs=(1, 1), **_WHOLE),
    "gradient of average pooling 7": _case(
        "average_pool_gradient", _LAST, _MEANS, moved=1 + 1 / 49, **_WHOLE
    ),
}
