"""oneDNN's results for Chainer match NumPy's in float64, and so do both derivatives."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import testing
from chainer.backends import intel64

from chainer_fast.onednn import library

pytestmark = pytest.mark.skipif(bool(library.why_not()), reason=library.why_not())
DIFFERENT = {"rtol": 1e-5, "atol": 1e-5}
DIFFERENT_BY_A_LITTLE = {"rtol": 1e-3, "atol": 1e-3}  # numerical gradients of float32


def values(*shape, seed=0):
    """Return numbers, none near 0 or each other, so that maxima and signs are clear."""
    count = int(np.prod(shape))
    numbers = (np.random.default_rng(seed).permutation(count) - count / 2 + 0.25) / count
    return 4 * numbers.reshape(shape)


def derivatives(function, arrays, dtype, use_ideep, times):
    """Return a function's result, the gradients of its square, and those of their squares."""
    with chainer.using_config("use_ideep", use_ideep):
        xs = [chainer.Variable(array.astype(dtype)) for array in arrays]
        results = [function(*xs)]
        found = list(results)
        for _ in range(times):
            total = sum(F.sum(y * y * values(*y.shape, seed=1).astype(dtype)) for y in results)
            results = chainer.grad([total], xs, enable_double_backprop=True)
            results = [gradient for gradient in results if gradient is not None]
            assert results
            found += results
        return [np.asarray(variable.array) for variable in found]


def check(function, *arrays, times=2):
    expected = derivatives(function, arrays, np.float64, "never", times)
    found = derivatives(function, arrays, np.float32, "auto", times)
    assert len(found) == len(expected)
    for got, right in zip(found, expected, strict=True):
        assert got.dtype == np.float32
        scale = np.abs(right).max() or 1
        np.testing.assert_allclose(got / scale, right / scale, **DIFFERENT)


def after_a_convolution(function, channels):
    """Return the function, applied to what a convolution leaves in oneDNN's layout."""
    weights = values(channels, channels, 1, 1, seed=9) + np.eye(channels)[:, :, None, None]

    def chained(x, *others):
        return function(F.convolution_2d(x, weights.astype(x.dtype)), *others)

    return chained


@pytest.fixture(params=["plain", "blocks"])
def given(request):
    """Give a function its input in NumPy's layout or as oneDNN leaves it."""

    def choose(function, channels):
        return function if request.param == "plain" else after_a_convolution(function, channels)

    return choose


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "x, w, options",
    [
        ((2, 3, 8, 8), (4, 3, 3, 3), {"pad": 1}),
        ((1, 16, 7, 7), (32, 16, 1, 1), {}),
        ((2, 32, 9, 9), (16, 32, 1, 1), {"stride": 2}),
        ((3, 17, 6, 5), (5, 17, 3, 2), {"stride": (2, 1), "pad": (1, 0)}),
        ((2, 3, 15, 15), (16, 3, 7, 7), {"stride": 2, "pad": 3}),
        ((2, 16, 7, 7), (16, 16, 3, 3), {"pad": 1, "cover_all": True, "stride": 2}),
        ((2, 4, 9, 9), (6, 4, 3, 3), {"dilate": 2}),
        ((2, 4, 9, 9), (6, 4, 3, 3), {"dilate": (1, 3), "pad": 2}),
        ((2, 8, 5, 5), (8, 2, 3, 3), {"groups": 4, "pad": 1}),
        ((2, 8, 5, 5), (8, 1, 3, 3), {"groups": 8}),
        ((1, 1, 1, 1), (1, 1, 1, 1), {}),
        ((2, 3, 4, 4), (8, 3, 3, 3), {"pad": 4}),
    ],
    ids=str,
)
def test_convolution_2d(x, w, options, bias, given):
    arrays = [values(*x), values(*w, seed=2), *([values(w[0], seed=3)] if bias else [])]
    check(given(lambda *xs: F.convolution_2d(*xs, **options), x[1]), *arrays)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "x, w, options",
    [
        ((2, 16, 5, 5), (16, 8, 3, 3), {"pad": 1}),
        ((2, 5, 4, 3), (5, 3, 4, 4), {"stride": 2, "pad": 1}),
        ((1, 4, 4, 4), (4, 6, 3, 3), {"stride": 2, "outsize": (8, 8), "pad": 1}),
        ((2, 4, 4, 4), (4, 3, 3, 3), {"dilate": 2}),
        ((2, 4, 4, 4), (4, 3, 3, 3), {"groups": 2}),
    ],
    ids=str,
)
def test_deconvolution_2d(x, w, options, bias, given):
    n_out = w[1] * options.get("groups", 1)
    arrays = [values(*x), values(*w, seed=2), *([values(n_out, seed=3)] if bias else [])]
    check(given(lambda *xs: F.deconvolution_2d(*xs, **options), x[1]), *arrays)


@pytest.mark.parametrize("pool", [F.max_pooling_2d, F.average_pooling_2d], ids=["max", "average"])
@pytest.mark.parametrize(
    "x, window, options",
    [
        ((2, 16, 6, 6), 2, {}),
        ((2, 3, 7, 7), 3, {"stride": 2}),
        ((1, 17, 5, 6), (3, 2), {"stride": (2, 1), "pad": (1, 0)}),
        ((2, 16, 5, 5), 5, {}),
        ((2, 16, 5, 5), 3, {"stride": 3, "pad": 2}),
        ((2, 4, 19, 19), 17, {}),  # more places in a window than a byte can count
    ],
    ids=str,
)
def test_pooling_2d(x, window, options, pool, given):
    check(given(lambda v: pool(v, window, **options), x[1]), values(*x))


@pytest.mark.parametrize("cover_all", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_max_pooling_that_covers_all_or_not(stride, cover_all, given):
    def pool(x):
        y = F.max_pooling_2d(x, 3, stride, pad=1, cover_all=cover_all)
        # A window that covers nothing has a maximum of minus infinity.
        return F.where(np.isfinite(y.array), y, np.ones(y.shape, y.dtype))

    check(given(pool, 16), values(2, 16, 8, 8))


def test_max_pooling_returns_indices(given):
    x = values(2, 16, 6, 6).astype(np.float32)
    pooled = given(lambda v: F.max_pooling_2d(v, 3, 2, return_indices=True)[0], 16)
    check(pooled, x, times=1)
    found = F.max_pooling_2d(x, 3, 2, return_indices=True)[1]
    with chainer.using_config("use_ideep", "never"):
        expected = F.max_pooling_2d(x, 3, 2, return_indices=True)[1]
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("shape", [(4, 16, 5, 5), (3, 5, 4, 2), (1, 3, 6, 6), (8, 7), (5, 32)])
def test_batch_normalization(shape, given):
    channels = shape[1]
    normalize = F.batch_normalization
    if len(shape) == 4:
        normalize = given(normalize, channels)
    check(normalize, values(*shape), values(channels, seed=2) + 3, values(channels, seed=3))


@pytest.mark.parametrize("axis", [(0, 1, 2), (1, 2, 3), (0,), (2, 3)], ids=str)
def test_batch_normalization_by_another_axis(axis):
    shape = (3, 4, 3, 3)
    others = tuple(n for i, n in enumerate(shape) if i not in axis)
    check(
        lambda *xs: F.batch_normalization(*xs, axis=axis),
        values(*shape),
        values(*others, seed=2) + 3,
        values(*others, seed=3),
    )


def test_batch_normalization_keeps_averages():
    averages = {}
    for mode, dtype in (("auto", np.float32), ("never", np.float64)):
        with chainer.using_config("use_ideep", mode):
            link = L.BatchNormalization(16, dtype=dtype)
            for seed in range(3):
                link(values(4, 16, 3, 3, seed=seed).astype(dtype))
            averages[mode] = link.avg_mean, link.avg_var
    for found, expected in zip(averages["auto"], averages["never"], strict=True):
        np.testing.assert_allclose(found, expected, **DIFFERENT)


@pytest.mark.parametrize("shape", [(4, 16, 5, 5), (3, 5, 4, 2), (8, 7)])
def test_fixed_batch_normalization(shape, given):
    c = shape[1]
    normalize = F.fixed_batch_normalization
    if len(shape) == 4:
        normalize = given(normalize, c)
    statistics = values(c, seed=2) + 3, values(c, seed=3), values(c, seed=4), values(c, seed=5) + 3
    check(normalize, values(*shape), *statistics)


@pytest.mark.parametrize(
    "function",
    [
        F.relu,
        F.leaky_relu,
        lambda x: F.leaky_relu(x, 0.0),
        lambda x: F.leaky_relu(x, -0.5),
        F.sigmoid,
        F.tanh,
        F.elu,
        lambda x: x * x + 2 * x - 1,
        lambda x: F.add(x, x * x, 2 * x),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.clip(x, -0.5, 0.5),
        lambda x: F.average(x, axis=(2, 3)),
        lambda x: F.sum(x, axis=(0, 2, 3)),
        lambda x: F.sum(x, axis=1),
        lambda x: F.sum(x, axis=(0, 2, 3), keepdims=True),
        lambda x: F.transpose(x, (0, 2, 3, 1)),
        lambda x: F.reshape(x, (len(x), -1)),
        lambda x: x[:, 1:, ::2],
        lambda x: F.softmax(x),
        lambda x: F.broadcast_to(F.sum(x, axis=(2, 3), keepdims=True), x.shape) * x,
        lambda x: F.im2col(x, 1),
        lambda x: F.unpooling_2d(x, 2),
        lambda x: F.depthwise_convolution_2d(x, np.ones((1, x.shape[1], 1, 1), x.dtype)),
    ],
    ids=range(23),
)
@pytest.mark.parametrize("shape", [(2, 16, 5, 5), (2, 5, 4, 3), (1, 32, 1, 1)], ids=str)
def test_functions_of_elements_and_others(shape, function, given):
    check(given(function, shape[1]), values(*shape))


@pytest.mark.parametrize("n", [3, 4, 5])
def test_local_response_normalization(n, given):
    f = given(lambda x: F.local_response_normalization(x, n, k=1, alpha=0.5), 16)
    check(f, values(2, 16, 4, 4), times=1)


@pytest.mark.parametrize("shape", [(2, 3, 4), (200, 300, 400), (1, 5, 1), (8, 2048, 300)], ids=str)
def test_linear(shape):
    n, n_in, n_out = shape
    check(F.linear, values(n, n_in), values(n_out, n_in, seed=2), values(n_out, seed=3))
    check(F.linear, values(n, n_in), values(n_out, n_in, seed=2))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_concat_and_split_axis(axis, given):
    def both(x):
        h = F.concat([x, 2 * x, x * x], axis)
        first, second, third = F.split_axis(h, 3, axis)
        most, last = F.split_axis(h, [h.shape[axis] - 1], axis)
        return F.concat([first * third, second, last, most], axis)

    check(given(both, 16), values(2, 16, 4, 4))


@pytest.mark.parametrize("shape", [(2, 16, 4, 4), (3, 5), (2, 3, 5, 5)], ids=str)
def test_dropout_takes_the_random_numbers_that_it_takes_without(shape):
    def seeded(x):
        np.random.seed(0)
        return F.dropout(x, 0.3)

    function = after_a_convolution(seeded, shape[1]) if len(shape) == 4 else seeded
    check(function, values(*shape))


def test_lstm():
    def function(c, x):
        cell, hidden = F.lstm(c, x)
        return cell * hidden

    check(function, values(3, 8), values(3, 32, seed=2))
    check(lambda c, d, x, y: F.slstm(c, d, x, y)[1], *(values(2, n) for n in (4, 4, 16, 16)))


def test_dropout_by_a_given_mask(given):
    x, mask = values(2, 16, 4, 4).astype("f"), (values(2, 16, 4, 4, seed=1) > 0).astype("f") * 2
    check(given(lambda v: F.dropout(v, mask=mask.astype(v.dtype)), 16), x)
    for each in (mask, intel64.ideep.array(mask)):
        y, returned = F.dropout(intel64.ideep.array(x), mask=each, return_mask=True)
        assert returned is each
        np.testing.assert_array_equal(np.asarray(y.array), x * mask)


@pytest.mark.parametrize("cache_score", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_cross_entropy_of_float16(normalize, cache_score):
    x, weights = values(4, 3, 5).astype(np.float16), values(3, seed=2) + 3
    t = np.arange(20).reshape(4, 5) % 4 - 1  # int64; -1 is ignored
    exact = x.astype("d") - np.log(np.exp(x.astype("d")).sum(1, keepdims=True))
    chosen = np.take_along_axis(exact, t.clip(0)[:, None], 1)[:, 0] * weights[t] * (t >= 0)
    count = (t >= 0).sum() if normalize else len(x)
    slopes = np.exp(exact) - (np.arange(3)[:, None] == t[:, None])
    slopes *= (weights[t] * (t >= 0))[:, None] / count
    device = chainer.get_device("@intel64")
    for twice in (False, True):
        variable = chainer.Variable(device.send(x))
        with chainer.using_config("use_ideep", "always"):
            loss = F.softmax_cross_entropy(
                variable,
                device.send(t),
                normalize,
                cache_score,
                device.send(weights.astype(np.float16)),
                enable_double_backprop=twice,
            )
            loss.backward()
        assert loss.dtype == variable.grad.dtype == np.float16
        np.testing.assert_allclose(loss.array, -chosen.sum() / count, rtol=2e-3)
        np.testing.assert_allclose(variable.grad, slopes, rtol=0, atol=4e-3 * abs(slopes).max())


@pytest.mark.parametrize("stride, dilate", [(1, 1), (2, 1), (1, 2)])
def test_chainers_own_harness_takes_what_onednn_leaves(stride, dilate):
    class Deconvolution(testing.FunctionTestCase):
        def generate_inputs(self):
            shapes = (2, 3, 4, 3), (3, 2, 3, 3), (2,)
            return tuple(values(*shape).astype("f") for shape in shapes)

        def forward(self, inputs, device):
            return (F.deconvolution_2d(*inputs, stride, 1, dilate=dilate),)

        def forward_expected(self, inputs):
            (y,) = self.forward(inputs, None)
            assert isinstance(y.array, intel64.mdarray)
            return (y.array,)

        def runTest(self):
            for use_ideep in ("never", "always"):
                config = testing.backend.BackendConfig({"use_ideep": use_ideep})
                self.check_forward_options = self.check_backward_options = DIFFERENT_BY_A_LITTLE
                self.check_double_backward_options = DIFFERENT_BY_A_LITTLE
                self.run_test_forward(config)
                self.run_test_backward(config)
                self.run_test_double_backward(config)

    Deconvolution().runTest()


def network(x, *parameters):
    """Return the output of a small residual network."""
    w1, w2, gamma, beta, w3 = parameters
    h = F.max_pooling_2d(F.relu(F.convolution_2d(x, w1, pad=1)), 2)
    shortcut = h
    h = F.relu(F.batch_normalization(F.convolution_2d(h, w2, pad=1), gamma, beta))
    h = F.relu(h + shortcut)
    return F.linear(F.average_pooling_2d(h, h.shape[2:]), w3)


def test_a_residual_network():
    shapes = [(4, 3, 8, 8), (16, 3, 3, 3), (16, 16, 3, 3), (16,), (16,), (10, 16)]
    arrays = [values(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    arrays[3] += 3
    check(network, *arrays)


@pytest.mark.parametrize("order", ["F", "transposed", "every other", "backwards"])
def test_input_that_is_not_contiguous(order):
    def scattered(array):
        if order == "F":
            return np.asfortranarray(array)
        if order == "transposed":
            return np.ascontiguousarray(array.transpose(1, 0, 3, 2)).transpose(1, 0, 3, 2)
        if order == "every other":
            return np.repeat(array, 2, axis=3)[..., ::2]
        return array[::-1, :, ::-1].copy()[::-1, :, ::-1]

    x, w = (values(*shape).astype(np.float32) for shape in ((2, 16, 6, 6), (16, 16, 3, 3)))
    for function in (
        lambda x: F.convolution_2d(x, w, pad=1),
        lambda x: F.relu(x),
        lambda x: F.max_pooling_2d(x, 2),
        lambda x: F.batch_normalization(x, np.ones(16, "f"), np.zeros(16, "f")),
        lambda x: F.linear(x, w.reshape(256, 9)[:, :1].T.repeat(36 * 16 // 256 + 1, 1)[:, :576]),
    ):
        expected = function(chainer.Variable(x)).array
        found = function(chainer.Variable(scattered(x))).array
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.convolution_2d(x, np.ones((4, 3, 3, 3), "f"), pad=1),
        F.relu,
        lambda x: F.relu(F.reshape(x, (0, 48))),
        lambda x: x + x,
    ],
    ids=["convolution", "relu", "matrix", "add"],
)
def test_an_empty_batch(function):
    x = chainer.Variable(np.zeros((0, 3, 4, 4), "f"))
    y = function(x)
    y.grad = np.zeros(y.shape, "f")
    y.backward()
    assert y.shape[0] == 0 and x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes_are_left_to_numpy(dtype):
    x, w = values(2, 3, 5, 5).astype(dtype), values(4, 3, 3, 3).astype(dtype)
    found = F.relu(F.convolution_2d(x, w)).array
    with chainer.using_config("use_ideep", "never"):
        expected = F.relu(F.convolution_2d(x, w)).array
    assert type(found) is np.ndarray and found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


def test_never_is_numpy_to_the_last_bit():
    x, w = values(2, 16, 6, 6).astype("f"), values(16, 16, 3, 3).astype("f")
    with chainer.using_config("use_ideep", "never"):
        found = F.convolution_2d(x, w).array
    columns = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    expected = np.rollaxis(
        np.tensordot(columns.transpose(0, 1, 4, 5, 2, 3), w, ((1, 2, 3), (1, 2, 3))), 3, 1
    )
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(2, 16, 8, 8), (3, 5), (4, 3, 300, 300)], ids=str)
def test_relu_and_what_is_no_number(shape, given):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    special = [np.nan, np.inf, -np.inf, -0.0, np.float32(np.nan) * -1]
    x.reshape(-1)[[0, 3, 5, 7, -1]] = special
    found = F.relu(x).array
    np.testing.assert_array_equal(np.asarray(found), np.maximum(x, 0))


def test_networks_stay_in_the_layout_of_onednn():
    x, w = (values(*shape).astype("f") for shape in ((2, 16, 6, 6), (16, 16, 3, 3)))
    gamma, beta = np.ones(16, "f"), np.zeros(16, "f")
    h = chainer.Variable(x)
    for layer in (
        lambda h: F.convolution_2d(h, w, pad=1),
        lambda h: F.batch_normalization(h, gamma, beta),
        F.relu,
        lambda h: h + h,
        lambda h: F.max_pooling_2d(h, 2),
    ):
        h = layer(h)
        assert isinstance(h.array, intel64.mdarray)
        assert h.array.is_in_blocks


def test_gradients_of_parameters_are_arrays_of_numpy():
    model = chainer.Sequential(
        L.Convolution2D(3, 16, 3), L.BatchNormalization(16), F.relu, L.Linear(None, 4)
    )
    F.sum(model(values(2, 3, 6, 6).astype("f"))).backward()
    for parameter in model.params():
        assert type(parameter.array) is np.ndarray
        assert type(parameter.grad) is np.ndarray
