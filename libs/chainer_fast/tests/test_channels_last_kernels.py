"""Kernels for channels-last images: compiled as C++, run on the CPU, against NumPy in float64."""

import numpy as np
import pytest

from chainer_fast.channels_last import layout
from chainer_fast.channels_last.kernels import NOWHERE, Kernels, takes
from libs.chainer_fast.tests.stand_in_cuda import Cupy
from libs.chainer_fast.tests.stand_in_kernels import to_gpu

#: Packs of 8, 4 and 1, and more packs than a block has threads.
CHANNELS = [24, 20, 5, 2056]
HALF = np.dtype("e")
WINDOWS = {
    # name: (rows and columns of images, ksize, stride, pad, rows and columns of the result)
    "of ResNet-50": ((12, 12), (3, 3), (2, 2), (1, 1), (6, 6)),
    "overhanging": ((8, 7), (3, 2), (2, 3), (0, 0), (4, 3)),
    "overlapping": ((5, 7), (3, 4), (1, 2), (1, 2), (5, 4)),
    "with gaps": ((7, 9), (2, 1), (3, 4), (0, 0), (2, 3)),
    "of no pixels": ((4, 4), (1, 1), (2, 2), (0, 0), (3, 3)),
    "as large as images": ((7, 5), (7, 5), (7, 5), (0, 0), (1, 1)),
    "without the edges": ((9, 9), (3, 2), (2, 3), (-1, -1), (3, 2)),
    "on one pixel": ((1, 1), (2, 2), (1, 1), (1, 1), (2, 2)),
}
all_windows = pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
all_channels = pytest.mark.parametrize("channels", CHANNELS)


@pytest.fixture
def cupy(compiled):
    return Cupy(compiled)


@pytest.fixture
def kernels(cupy):
    return Kernels(cupy)


def draw(shape, seed=0):
    """Return channels-last integers: sums of them are exact in float32."""
    values = np.random.default_rng(seed).integers(-60, 60, size=shape)
    return layout.as_shaped(to_gpu(np.ascontiguousarray(layout.as_stored(values)).astype("e")))


def pixels_of(size, k, s, p, out):
    """Return where the pixels of a window are, and where in the window."""
    start = out * s - p
    found = np.arange(max(0, start), min(size, start + k))
    return found, found - start


def each_window(shape, windows):
    """Yield where a window's maximum goes, its pixels, and their places in the window."""
    sizes, ksize, stride, pad, outs = windows
    assert tuple(shape[2:]) == sizes
    for y, x in np.ndindex(*outs):
        (rows, above), (columns, left) = (
            pixels_of(*each) for each in zip(sizes, ksize, stride, pad, (y, x), strict=True)
        )
        places = (above[:, None] * ksize[1] + left).ravel()
        yield (y, x), np.repeat(rows, len(columns)), np.tile(columns, len(rows)), places


def check(found, expected):
    assert layout.as_stored(found).flags.c_contiguous
    assert found.dtype == HALF
    np.testing.assert_array_equal(found, np.asarray(expected).astype(HALF))


@all_channels
def test_a_bias_is_added(channels, kernels):
    y, numbers = draw((3, channels, 5, 7)), to_gpu(np.arange(2 * channels).astype("e") % 500)
    for bias in numbers[:channels], numbers[::2], numbers[channels - 1 :: -1]:
        expected = y.astype("d") + bias[:, None, None]
        kernels.add_bias(y, bias)
        check(y, expected)


def test_a_bias_for_other_channels_is_refused(kernels):
    """Chainer says so before, unless ``chainer.config.type_check`` is off."""
    with pytest.raises(ValueError, match="broadcast"):
        kernels.add_bias(draw((3, 8, 5, 7)), to_gpu(np.ones(4, "e")))


@all_channels
@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 1, 2), (3, 20, 33)])
def test_sums_are_exact_whatever_the_number_of_channels(channels, shape, kernels):
    n, *sizes = shape
    x = draw((n, channels, *sizes))
    found = kernels.sum_by_channel(x)
    assert (found.shape, found.dtype) == ((channels,), HALF)
    np.testing.assert_array_equal(found, x.astype("d").sum(axis=(0, 2, 3)).astype("e"))


def test_sums_are_of_many_blocks_and_of_float32(kernels, cupy):
    # In float16, 2048 + 1 is 2048.
    x = layout.as_shaped(to_gpu(np.ones((4, 100, 100, 24), "e")))
    np.testing.assert_array_equal(kernels.sum_by_channel(x), np.full(24, 40000, "e"))
    (name, _, (blocks, _)), _ = cupy.launches
    assert (name, blocks) == ("sum_rows", 30)


@pytest.mark.parametrize(("channels", "more"), [(3, 4), (3, 8), (1, 5), (8, 24), (64, 64)])
@pytest.mark.parametrize("order", ["channels last", "Chainer's", "with gaps"])
def test_new_channels_are_zero(channels, more, order, kernels):
    x = draw((3, channels, 20, 30))
    if order == "with gaps":
        x = draw((3, channels, 20, 60))[:, :, :, ::2]
    found = kernels.padded(to_gpu(np.ascontiguousarray(x)) if "'" in order else x, more)
    np.testing.assert_array_equal(found[:, :channels], x)
    np.testing.assert_array_equal(found[:, channels:], np.zeros((3, more - channels, 20, 30)))
    check(found, found)


def expected_maxima(x, windows):
    """Return maxima, and places as in Chainer's kernel: no number is greater than NaN."""
    y = np.full((*x.shape[:2], *windows[-1]), -np.inf)
    places = np.full(y.shape, NOWHERE)
    for (row, column), rows, columns, of_window in each_window(x.shape, windows):
        if len(rows):
            values = x[:, :, rows, columns].astype("d")
            values[np.isnan(values)] = -np.inf
            y[:, :, row, column] = values.max(axis=2)
            of_maxima = of_window[values.argmax(axis=2)]
            has_first = rows[0] == columns[0] == 0
            place = of_window[0] if has_first else NOWHERE
            is_none = np.isneginf(values.max(axis=2))
            places[:, :, row, column] = np.where(is_none, place, of_maxima)
    return y, places


@all_windows
@all_channels
def test_max_pooling(channels, windows, kernels):
    sizes, ksize, stride, pad, outs = windows
    x, gy = draw((2, channels, *sizes)), draw((2, channels, *outs), 1)
    x[0, 0] = np.nan
    x[1, -1] = -np.inf
    x[0, -1, -1, -1], x[1, 0, 0, 0] = np.nan, np.inf
    expected, expected_places = expected_maxima(x, windows)
    y, places = kernels.max_pool(x, ksize, stride, pad, outs)
    check(y, expected)
    np.testing.assert_array_equal(places, expected_places)
    gradient = np.zeros(x.shape)
    for (row, column), rows, columns, of_window in each_window(x.shape, windows):
        for r, c, place in zip(rows, columns, of_window, strict=True):
            taken = gy[:, :, row, column].astype("d")
            gradient[:, :, r, c] += np.where(places[:, :, row, column] == place, taken, 0)
    found = kernels.max_pool_gradient(gy, places, ksize, stride, pad, x.shape)
    check(found, gradient)


@all_windows
@all_channels
def test_average_pooling(channels, windows, kernels):
    sizes, ksize, stride, pad, outs = windows
    x, gy = draw((2, channels, *sizes)), draw((2, channels, *outs), 1)
    y, gx = np.zeros((2, channels, *outs)), np.zeros(x.shape)
    for (row, column), rows, columns, _ in each_window(x.shape, windows):
        y[:, :, row, column] = x[:, :, rows, columns].astype("d").sum(axis=2)
        gx[:, :, rows, columns] += gy[:, :, row, column, None].astype("d")
    count = ksize[0] * ksize[1]
    check(kernels.average_pool(x, ksize, stride, pad, outs), y / count)
    check(kernels.average_pool_gradient(gy, ksize, stride, pad, x.shape), gx / count)


def test_more_images_than_a_grid_is_high(kernels, cupy):
    x = draw((70_000, 1, 1, 2))
    y, places = kernels.max_pool(x, (1, 2), (1, 2), (0, 0), (1, 1))
    check(y, x.max(axis=3, keepdims=True))
    np.testing.assert_array_equal(places, x.argmax(axis=3, keepdims=True))
    assert cupy.launches[-1][2] == (1, 65535)


def test_arrays_that_are_not_aligned(kernels, cupy):
    room = to_gpu(np.zeros(1 + 2 * 3 * 3 * 16, "e"))
    x = layout.as_shaped(room[1:].reshape(2, 3, 3, 16))
    x[...] = draw(x.shape)
    y = kernels.average_pool(x, (3, 3), (3, 3), (0, 0), (1, 1))
    check(y, x.astype("d").mean(axis=(2, 3), keepdims=True))
    ((_, defined, _),) = cupy.launches
    assert "#define LANES 1" in defined


def test_nothing_to_pool(kernels, cupy):
    y = kernels.average_pool(draw((2, 8, 3, 3)), (3, 3), (1, 1), (0, 0), (0, 1))
    assert (y.shape, cupy.launches) == ((2, 8, 0, 1), [])


def test_what_kernels_take():
    x = draw((2, 8, 3, 3))
    assert takes(x)
    for other in (np.ascontiguousarray(x), x.astype("f"), x[:, :, ::2], x[:, :4], x[:, :, 0]):
        assert not takes(other)
