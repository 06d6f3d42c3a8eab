"""Kernels for channels-last images on a GPU, against Chainer's code in host memory, in float64."""

import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainer_fast.channels_last import layout
from chainer_fast.channels_last.kernels import the_kernels

pytestmark = pytest.mark.gpu

SHAPES = {
    "first of ResNet-50": (4, 64, 112, 112),
    "last of ResNet-50": (16, 2048, 7, 7),
    "more than 2048 channels": (3, 2056, 9, 11),
    "packs of 4": (3, 20, 13, 9),
    "one at a time": (3, 5, 8, 9),
    "two pixels": (1, 8, 1, 2),
}
FUNCTIONS = {
    "max": lambda x: F.max_pooling_2d(x, 3, 2, 1),
    "max, without the rest": lambda x: F.max_pooling_2d(x, (1, 2), (2, 1), cover_all=False),
    "mean": lambda x: F.average_pooling_2d(x, (3, 2), (1, 2), (1, 0)),
    "mean of images": lambda x: F.average_pooling_2d(x, x.shape[2:]),
    "sum": lambda x: F.sum(x, (0, 2, 3)),
}
all_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def send(device, keep_channels_last):
    """Return a function that sends an array to the GPU, channels last or in Chainer's order."""
    device.use()

    def send(array, order="channels last"):
        array = device.send(array)
        return layout.converted(device.xp, array) if order == "channels last" else array

    return send


def draw(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("e")


def assert_close(found, expected):
    expected = np.asarray(expected)
    np.testing.assert_allclose(found.get().astype("d"), expected, 2e-3, 2e-3 * abs(expected).max())


@all_shapes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_gradients(name, shape, send):
    function = FUNCTIONS[name]
    x = draw(shape)
    with chainer.using_config("use_ideep", "never"):
        on_host = chainer.Variable(x.astype("d"))
        expected = function(on_host)
        gy = draw(expected.shape, 1)
        expected.grad = gy.astype("d")
        expected.backward()
    on_gpu = chainer.Variable(send(x))
    y = function(on_gpu)
    y.grad = send(gy, "channels last" if gy.ndim == 4 else "Chainer's")
    y.backward()
    assert_close(y.array, expected.array)
    assert_close(on_gpu.grad, on_host.grad)
    if name != "sum":
        assert layout.as_stored(y.array).flags.c_contiguous
        assert layout.as_stored(on_gpu.grad).flags.c_contiguous


@pytest.mark.parametrize("cover_all", [False, True])
def test_indexes_and_gradients_of_gradients(cover_all, send):
    """They are those of Chainer's own kernel, even for NaN and infinity."""
    x = draw((3, 16, 12, 13))
    x[0, :3], x[0, 3, 2:5, 1:], x[0, 4, ::2] = -np.inf, np.nan, np.inf
    found = []
    for order in ("channels last", "Chainer's"):
        x_ = chainer.Variable(send(x, order))
        y, indexes = F.max_pooling_2d(x_, 3, 2, 1, cover_all, return_indices=True)
        gy = chainer.Variable(send(draw(y.shape, 1), order))
        (gx,) = chainer.grad([y], [x_], [gy], enable_double_backprop=True)
        (ggy,) = chainer.grad([gx], [gy], [chainer.Variable(send(draw(x.shape, 2), order))])
        found.append([each.get() for each in (y.array, indexes, ggy.array)])
    for ours, chainers in zip(*found, strict=True):
        assert ours.dtype == chainers.dtype
        np.testing.assert_array_equal(ours, chainers)


@all_shapes
def test_sums_have_the_same_bits_each_time(shape, send):
    x = send(draw(shape))
    first, second = (the_kernels().sum_by_channel(x).get() for _ in range(2))
    assert first.tobytes() == second.tobytes()


@all_shapes
def test_a_bias_is_added(shape, send):
    y, bias = draw(shape), draw(shape[1:2], 1)
    found = send(y)
    the_kernels().add_bias(found, send(bias, "Chainer's"))
    np.testing.assert_array_equal(found.get(), y + bias[:, None, None])


@pytest.mark.parametrize("order", ["channels last", "Chainer's"])
@pytest.mark.parametrize(("channels", "more"), [(3, 8), (3, 4), (1, 5), (8, 24)])
def test_new_channels_are_zero(channels, more, order, send):
    x = draw((3, channels, 224, 225))
    found = the_kernels().padded(send(x, order), more)
    assert layout.is_channels_last(found)
    expected = np.zeros((3, more, 224, 225), "e")
    expected[:, :channels] = x
    np.testing.assert_array_equal(found.get(), expected)
