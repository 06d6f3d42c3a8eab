"""Pooling and sums of channels-last images give what Chainer gives in its own order.

All kernels, Chainer's too, are compiled as C++ and run on the CPU.
"""

import contextlib

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.backends import cuda

from chainer_fast.channels_last import layout
from chainer_fast.channels_last.kernels import Kernels
from chainer_fast.repairs import reductions
from libs.chainer_fast.tests.stand_in_cuda import Cupy
from libs.chainer_fast.tests.stand_in_kernels import Array, Kernel, to_gpu


class Gpu(chainer.backend.Device):
    """A GPU that computes in host memory."""

    xp = Cupy
    create_context = staticmethod(contextlib.nullcontext)


def get_array_module(*arrays):
    return Cupy if any(isinstance(each, Array) for each in arrays) else np


@pytest.fixture(autouse=True)
def cupy(monkeypatch, compiled, keep_channels_last):
    """Make Chainer see a GPU, with the repairs; return a CuPy that records our kernels."""
    cupy = Cupy(compiled)
    for name, value in (
        ("elementwise", lambda *texts: Kernel(*texts)),
        ("ndarray", Array),
        ("cupy", cupy),
    ):
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(
        cuda.GpuDevice,
        "from_array",
        staticmethod(lambda array: Gpu() if isinstance(array, Array) else None),
    )
    for module in (cuda, chainer.backend):
        monkeypatch.setattr(module, "get_array_module", get_array_module)
    monkeypatch.setattr(Kernel, "compiled", staticmethod(compiled), raising=False)
    monkeypatch.setattr(reductions, "the_kernels", lambda: Kernels(cupy))
    return cupy


def draw(shape, seed=0):
    """Return numbers in Chainer's order: multiples of 1/4, whose sums are exact."""
    values = np.random.default_rng(seed).integers(-40, 40, size=shape) / 4
    return to_gpu(values.astype("e"))


def channels_last(array):
    return layout.converted(Cupy, array)


def forward_and_back(function, x, order):
    """Return a result, its gradient, and the gradient of that for the gradient of the result."""
    x = chainer.Variable(order(x))
    y = function(x)
    gy = chainer.Variable(order(draw(y.shape, 1)))
    (gx,) = chainer.grad([y], [x], [gy], enable_double_backprop=True)
    (ggy,) = chainer.grad([gx], [gy], [chainer.Variable(order(draw(x.shape, 2)))])
    return [each.array for each in (y, gx, ggy)]


POOLING = {
    "max": lambda x: F.max_pooling_2d(x, 3, 2, 1),
    "max, without the rest": lambda x: F.max_pooling_2d(x, (3, 2), (1, 2), (0, 1), False),
    "means": lambda x: F.average_pooling_2d(x, (4, 2), np.int64(2), (2, 0)),
    "means of images": lambda x: F.average_pooling_2d(x, x.shape[2:]),
    "means, any dimension": lambda x: F.average_pooling_nd(x, (4, 2), 2, (2, 0)),
}


@pytest.mark.parametrize("name", POOLING)
def test_pooling_keeps_channels_last(name, cupy):
    x, pool = draw((2, 8, 4, 8)), POOLING[name]
    with chainer.using_config("use_ideep", "never"):
        expected = forward_and_back(pool, x, lambda array: np.asarray(array, "d"))
    assert cupy.launches == []
    found = forward_and_back(pool, x, channels_last)
    for ours, exact in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, exact.astype("e"))
        assert ours.dtype == np.float16
    for array in found[:2]:
        assert layout.as_stored(array).flags.c_contiguous
    assert len(cupy.launches) == (2 if "max" in name else 3)


@pytest.mark.parametrize("options", [{"pad": 1}, {"pad": (1, 0), "cover_all": False}])
def test_what_is_no_number_has_the_places_that_chainer_gives_it(options):
    """As in Chainer's kernel, no number is greater than NaN or less than -inf."""
    x = draw((1, 8, 6, 6))
    x[0, :3], x[0, 3, 2:5, 1:], x[0, 4, ::2] = -np.inf, np.nan, np.inf
    pool = lambda x: F.max_pooling_2d(x, 3, 2, return_indices=True, **options)  # noqa: E731
    (y, indexes), (expected, expected_indexes) = pool(channels_last(x)), pool(x)
    np.testing.assert_array_equal(y.array, expected.array)
    np.testing.assert_array_equal(indexes, expected_indexes)
    assert indexes.dtype == expected_indexes.dtype == np.int32
    for ours, theirs in zip(
        forward_and_back(lambda x: pool(x)[0], x, channels_last),
        forward_and_back(lambda x: pool(x)[0], x, lambda array: array),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_gradient_in_chainers_order(cupy):
    x = chainer.Variable(channels_last(draw((2, 8, 6, 6))))
    for function in (lambda: F.max_pooling_2d(x, 2), lambda: F.average_pooling_2d(x, 2)):
        y = function()
        gradients = [
            chainer.grad([y], [x], [chainer.Variable(order(draw(y.shape)))])[0].array
            for order in (channels_last, lambda array: array)
        ]
        np.testing.assert_array_equal(*gradients)
        assert layout.is_channels_last(gradients[1])


LEFT = {
    "Chainer's order": lambda x: F.max_pooling_2d(np.ascontiguousarray(x).view(Array), 2),
    "float32": lambda x: F.average_pooling_2d(x.astype("f"), 2),
    "large windows": lambda x: F.max_pooling_2d(x, 16, pad=15),
    "means of pixels only": lambda x: F.average_pooling_nd(x, 2, pad=1, pad_value=None),
}


@pytest.mark.parametrize("name", LEFT)
def test_pooling_that_is_left_to_chainer(name, cupy, monkeypatch):
    launched = []
    kernel = lambda *texts: lambda *args: launched.append(texts[-1])  # noqa: E731
    for owner, attribute, value in (
        (cuda, "elementwise", kernel),
        (cupy, "array", np.array),
        (cupy, "reciprocal", np.reciprocal),
    ):
        monkeypatch.setattr(owner, attribute, value, raising=False)
    LEFT[name](channels_last(draw((2, 8, 6, 6))))
    assert (len(launched), cupy.launches) == (1, [])


@pytest.mark.parametrize("axis", [(0, 2, 3), (3, 0, 2), (-1, -4, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_sums(axis, keepdims, cupy):
    x = draw((2, 8, 6, 6))
    y = F.sum(channels_last(x), axis, keepdims)
    expected = x.astype("d").sum(axis, keepdims=keepdims)
    assert (y.shape, y.dtype) == (expected.shape, x.dtype)
    np.testing.assert_array_equal(y.array, expected.astype("e"))
    assert [name for name, *_ in cupy.launches] == ["sum_rows", "sum_sums"]


@pytest.mark.parametrize("axis", [(0, 2), (0, 1, 2, 3), None, 0])
def test_other_sums_are_left_to_chainer(axis, cupy):
    x = draw((2, 8, 6, 6))
    np.testing.assert_array_equal(F.sum(channels_last(x), axis).array, x.sum(axis))
    assert cupy.launches == []
    with chainer.using_config("type_check", False), pytest.raises(np.exceptions.AxisError):
        F.sum(channels_last(x), axis=(0, 2, 7))
    on_cpu = F.sum(np.asarray(channels_last(x)), axis=(0, 2, 3))
    np.testing.assert_array_equal(on_cpu.array, np.asarray(x).sum(axis=(0, 2, 3)))
    assert cupy.launches == []
