"""``concat``: join arrays along an axis, and split them."""

from __future__ import annotations

from typing import Any

import numpy

from chainer_fast.ideep4py.arrays import mdarray
from chainer_fast.onednn.layouts import blocked
from chainer_fast.onednn.primitives import Tensor


class mdarrayVector(list[Any]):
    """Arrays, with the interface of a C++ vector."""

    push_back = list.append


class intVector(list[int]):
    """Numbers, with the interface of a C++ vector."""

    push_back = list.append


def Forward(xs: mdarrayVector, axis: int) -> Any:
    """Return the concatenation of arrays with four axes."""
    if all(map(_fills_blocks, xs)):
        return _from_blocks(numpy.concatenate(list(map(_blocks, xs)), axis))
    return numpy.concatenate(list(map(numpy.asarray, xs)), axis)


def Backward(x: mdarray, offsets: intVector, axis: int) -> tuple[Any, ...]:
    """Split an array with four axes at the offsets."""
    length = blocked(x.shape).block if axis == 1 else 1
    if not _fills_blocks(x) or any(offset % length for offset in offsets):
        return tuple(numpy.split(numpy.asarray(x), offsets, axis))
    parts = numpy.split(_blocks(x), [offset // length for offset in offsets], axis)
    return tuple(_from_blocks(numpy.ascontiguousarray(part)) for part in parts)


def _fills_blocks(x: mdarray) -> bool:
    """Return whether an array is in blocks of channels and fills them."""
    if not x.is_in_blocks:
        return False
    layout = x.tensor.layout
    return layout.is_full and layout is blocked(x.shape)


def _blocks(x: mdarray) -> numpy.ndarray:
    return x.tensor.layout.blocks(x.tensor.buffer)


def _from_blocks(blocks: numpy.ndarray) -> mdarray:
    n, groups, h, w, block = blocks.shape
    return mdarray(Tensor(blocked((n, groups * block, h, w)), blocks.reshape(-1)))
