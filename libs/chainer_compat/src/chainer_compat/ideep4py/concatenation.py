"""``concat``: put arrays together along an axis, and take them apart."""

from __future__ import annotations

from typing import Any

import numpy

from chainer_compat.ideep4py.arrays import mdarray


class mdarrayVector(list[Any]):
    """Arrays, filled as a vector of C++ is."""

    push_back = list.append


class intVector(list[int]):
    """Numbers, filled as a vector of C++ is."""

    push_back = list.append


def Forward(xs: mdarrayVector, axis: int) -> Any:
    """Return the concatenation of arrays with four axes."""
    return numpy.concatenate([numpy.asarray(x) for x in xs], axis)


def Backward(x: mdarray, offsets: intVector, axis: int) -> tuple[Any, ...]:
    """Return the parts of an array with four axes, which end at the offsets and at the end."""
    return tuple(numpy.split(numpy.asarray(x), offsets, axis))
