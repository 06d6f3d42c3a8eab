"""The primitives that Chainer uses, created on first use for each shape and layout."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from chainer_fast.onednn.layouts import Layout, any_layout, plain
from chainer_fast.onednn.library import Dims, Handle
from chainer_fast.onednn.primitives import Arg, Primitive, describe, kept, operand

Shape = tuple[int, ...]

_TRAINING, _INFERENCE, _BACKWARD = 64, 96, 128
_DIRECT = 1  # never Winograd's algorithm, which rounds more
_RELU, _ADD, _MAX = 0x20, 0x1FFF0, 0x1FFF2
MAX_POOLING, AVERAGE_POOLING, LRN = 0x1FF, 0x2FF, 0xAFF
_GIVEN_STATISTICS, _SCALE, _SHIFT = 1, 2, 4


class Window(NamedTuple):
    """The movement of a convolution's or pooling's window, with values as (height, width)."""

    strides: tuple[int, int]
    dilations: tuple[int, int]
    before: tuple[int, int]
    behind: tuple[int, int]

    def dims(self) -> tuple[ctypes.Array[ctypes.c_int64], ...]:
        """Return strides, dilations counted from 0, and padding."""
        dy, dx = self.dilations
        return (
            Dims(*self.strides),
            Dims(dy - 1, dx - 1),
            Dims(*self.before),
            Dims(*self.behind),
        )


@kept
def convolution(x: Shape, w: Shape, y: Shape, has_bias: bool, window: Window) -> Primitive:
    """From SRC, WEIGHTS and perhaps BIAS to DST."""
    inputs = [Arg.SRC, Arg.WEIGHTS, *([Arg.BIAS] if has_bias else [])]
    return Primitive(_convolution(x, w, y, has_bias, window), inputs, [Arg.DST])


@kept
def convolution_backward_data(x: Shape, w: Shape, y: Shape, window: Window) -> Primitive:
    """From WEIGHTS and DIFF_DST to DIFF_SRC."""
    layouts = map(any_layout, (x, w, y))
    forward = _convolution(x, w, y, False, window)
    kind = "convolution_backward_data"
    descriptor = describe(kind, _DIRECT, *layouts, *window.dims(), forward)
    return Primitive(descriptor, [Arg.WEIGHTS, Arg.DIFF_DST], [Arg.DIFF_SRC])


@kept
def convolution_backward_weights(x: Shape, w: Shape, y: Shape, window: Window) -> Primitive:
    """From SRC and DIFF_DST to DIFF_WEIGHTS."""
    layouts = any_layout(x), any_layout(w), None, any_layout(y)
    forward = _convolution(x, w, y, False, window)
    kind = "convolution_backward_weights"
    descriptor = describe(kind, _DIRECT, *layouts, *window.dims(), forward)
    return Primitive(descriptor, [Arg.SRC, Arg.DIFF_DST], [Arg.DIFF_WEIGHTS])


@kept
def pooling(kind: int, x: Layout, y: Shape, kernel: tuple[int, int], window: Window) -> Primitive:
    """From SRC to DST and, for max pooling, the places of maxima to WORKSPACE."""
    outputs = [Arg.DST, *([Arg.WORKSPACE] if kind == MAX_POOLING else [])]
    return Primitive(_pooling(kind, x, y, kernel, window), [Arg.SRC], outputs)


@kept
def pooling_backward(
    kind: int, x: Layout, y: Shape, kernel: tuple[int, int], window: Window
) -> Primitive:
    """From DIFF_DST and, for max pooling, WORKSPACE to DIFF_SRC."""
    forward = _pooling(kind, x, y, kernel, window)
    y_layout = operand(forward, Arg.DST)
    assert y_layout is not None
    layouts = x.handle, y_layout.handle
    strides, *rest = window.dims()
    window_of = strides, Dims(*kernel), *rest
    descriptor = describe("pooling_backward", kind, *layouts, *window_of, forward)
    inputs = [Arg.DIFF_DST, *([Arg.WORKSPACE] if kind == MAX_POOLING else [])]
    return Primitive(descriptor, inputs, [Arg.DIFF_SRC])


@kept
def batch_normalization(x: Layout, eps: float) -> Primitive:
    """From SRC, SCALE and SHIFT to DST, MEAN and VARIANCE."""
    inputs, outputs = [Arg.SRC, Arg.SCALE, Arg.SHIFT], [Arg.DST, Arg.MEAN, Arg.VARIANCE]
    return Primitive(_batch_normalization(x, eps, _TRAINING, _SCALE | _SHIFT), inputs, outputs)


@kept
def fixed_batch_normalization(x: Layout, eps: float) -> Primitive:
    """From SRC, SCALE, SHIFT, MEAN and VARIANCE to DST."""
    flags = _SCALE | _SHIFT | _GIVEN_STATISTICS
    inputs = [Arg.SRC, Arg.SCALE, Arg.SHIFT, Arg.MEAN, Arg.VARIANCE]
    return Primitive(_batch_normalization(x, eps, _INFERENCE, flags), inputs, [Arg.DST])


@kept
def batch_normalization_backward(x: Layout, eps: float) -> Primitive:
    """From SRC, MEAN, VARIANCE, SCALE and DIFF_DST to DIFF_SRC, DIFF_SCALE and DIFF_SHIFT."""
    flags = _SCALE | _SHIFT
    forward = _batch_normalization(x, eps, _TRAINING, flags)
    kind = "batch_normalization_backward"
    descriptor = describe(kind, _BACKWARD, *[x.handle] * 3, eps, flags, forward)
    inputs = [Arg.SRC, Arg.MEAN, Arg.VARIANCE, Arg.SCALE, Arg.DIFF_DST]
    return Primitive(descriptor, inputs, [Arg.DIFF_SRC, Arg.DIFF_SCALE, Arg.DIFF_SHIFT])


@kept
def relu(x: Layout, slope: float) -> Primitive:
    """From SRC to DST. A slope of 0 turns NaN into 0."""
    return Primitive(_relu(x, slope), [Arg.SRC], [Arg.DST])


@kept
def relu_backward(x: Layout, slope: float) -> Primitive:
    """From SRC and DIFF_DST to DIFF_SRC."""
    layouts = [x.handle] * 3
    descriptor = describe("eltwise_backward", _RELU, *layouts, slope, 0.0, _relu(x, slope))
    return Primitive(descriptor, [Arg.SRC, Arg.DIFF_DST], [Arg.DIFF_SRC])


@kept
def add(x: Layout) -> Primitive:
    """From SRC and SRC_1 to DST."""
    return Primitive(describe("binary", _ADD, *[x.handle] * 3), [Arg.SRC, Arg.SRC_1], [Arg.DST])


@kept
def maximum(x: Layout) -> Primitive:
    """From SRC and SRC_1 to DST, which is NaN where SRC_1 is."""
    descriptor = describe("binary", _MAX, *[x.handle] * 3)
    return Primitive(descriptor, [Arg.SRC, Arg.SRC_1], [Arg.DST])


@kept
def local_response_normalization(
    x: Layout, n: int, k: float, alpha: float, beta: float
) -> Primitive:
    """From SRC to DST and WORKSPACE."""
    return Primitive(_lrn(x, n, k, alpha, beta), [Arg.SRC], [Arg.DST, Arg.WORKSPACE])


@kept
def local_response_normalization_backward(
    x: Layout, n: int, k: float, alpha: float, beta: float
) -> Primitive:
    """From SRC, DIFF_DST and WORKSPACE to DIFF_SRC."""
    forward = _lrn(x, n, k, alpha, beta)
    descriptor = describe("lrn_backward", LRN, *[x.handle] * 3, n, alpha, beta, k, forward)
    return Primitive(descriptor, [Arg.SRC, Arg.DIFF_DST, Arg.WORKSPACE], [Arg.DIFF_SRC])


def _convolution(x: Shape, w: Shape, y: Shape, has_bias: bool, window: Window) -> Handle:
    bias = plain(y[1:2]).handle if has_bias else None
    layouts = any_layout(x), any_layout(w), bias, any_layout(y)
    return describe("convolution_forward", _TRAINING, _DIRECT, *layouts, *window.dims())


def _pooling(kind: int, x: Layout, y: Shape, kernel: tuple[int, int], window: Window) -> Handle:
    strides, *rest = window.dims()
    window_of = strides, Dims(*kernel), *rest
    return describe("pooling_forward", _TRAINING, kind, x.handle, any_layout(y), *window_of)


def _batch_normalization(x: Layout, eps: float, kind: int, flags: int) -> Handle:
    return describe("batch_normalization_forward", kind, x.handle, x.handle, eps, flags)


def _relu(x: Layout, slope: float) -> Handle:
    return describe("eltwise_forward", _TRAINING, _RELU, x.handle, x.handle, slope, 0.0)


def _lrn(x: Layout, n: int, k: float, alpha: float, beta: float) -> Handle:
    return describe("lrn_forward", _TRAINING, LRN, x.handle, x.handle, n, alpha, beta, k)
