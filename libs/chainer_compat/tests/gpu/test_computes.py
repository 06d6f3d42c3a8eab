"""Chainer's functions and links on a GPU, forward and backward, against those in host memory."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.backends import cuda

pytestmark = pytest.mark.gpu

TOLERANCES = {"float16": 2e-2, "float32": 1e-4}
LABELS = np.array([2, 0, 3], np.int32)
SHAPES = {"matrix": (3, 4), "image": (2, 4, 8, 8), "sequence": (5, 3), "cube": (2, 3, 4)}

FUNCTIONS = {
    # name: (shape of x, function of x and the array module)
    "relu": ("matrix", lambda x, xp: F.relu(x)),
    "sigmoid": ("matrix", lambda x, xp: F.sigmoid(x)),
    "tanh": ("matrix", lambda x, xp: F.tanh(x)),
    "softmax": ("matrix", lambda x, xp: F.softmax(x)),
    "log_softmax": ("matrix", lambda x, xp: F.log_softmax(x)),
    "leaky_relu": ("matrix", lambda x, xp: F.leaky_relu(x)),
    "elu": ("matrix", lambda x, xp: F.elu(x)),
    "softplus": ("matrix", lambda x, xp: F.softplus(x)),
    "clipped_relu": ("matrix", lambda x, xp: F.clipped_relu(x)),
    "maxout": ("matrix", lambda x, xp: F.maxout(x, 2)),
    "exp": ("matrix", lambda x, xp: F.exp(x)),
    "sqrt": ("matrix", lambda x, xp: F.sqrt(x * x + 1)),
    "sum": ("cube", lambda x, xp: F.sum(x, axis=1)),
    "mean": ("cube", lambda x, xp: F.mean(x, axis=(0, 2))),
    "max": ("matrix", lambda x, xp: F.max(x, axis=1)),
    "matmul": ("matrix", lambda x, xp: F.matmul(x, x, transb=True)),
    "batch_matmul": ("cube", lambda x, xp: F.matmul(x, x, transb=True)),
    "concat": ("matrix", lambda x, xp: F.concat([x, 2 * x])),
    "stack": ("matrix", lambda x, xp: F.stack([x, x + 1])),
    "split_axis": ("matrix", lambda x, xp: F.split_axis(x, 2, 1)[1]),
    "transpose": ("cube", lambda x, xp: F.transpose(x, (2, 0, 1))),
    "reshape": ("cube", lambda x, xp: F.reshape(x, (4, -1))),
    "broadcast_to": ("matrix", lambda x, xp: F.broadcast_to(x, (2, 3, 4))),
    "get_item": ("matrix", lambda x, xp: x[1:, ::2]),
    "where": ("matrix", lambda x, xp: F.where(x.array > 0, x, 2 * x)),
    "pad": ("matrix", lambda x, xp: F.pad(x, 1, "constant")),
    "select_item": ("matrix", lambda x, xp: F.select_item(x, xp.asarray(LABELS))),
    "softmax_cross_entropy": (
        "matrix",
        lambda x, xp: F.softmax_cross_entropy(x, xp.asarray(LABELS)),
    ),
    "sigmoid_cross_entropy": (
        "matrix",
        lambda x, xp: F.sigmoid_cross_entropy(x, xp.ones((3, 4), np.int32)),
    ),
    "mean_squared_error": ("matrix", lambda x, xp: F.mean_squared_error(x, 2 * x + 1)),
    "huber_loss": ("matrix", lambda x, xp: F.huber_loss(x, 3 * x, 1.0)),
    "max_pooling_2d": ("image", lambda x, xp: F.max_pooling_2d(x, 3, 2)),
    "average_pooling_2d": ("image", lambda x, xp: F.average_pooling_2d(x, 2)),
    "local_response_normalization": (
        "image",
        lambda x, xp: F.local_response_normalization(x),
    ),
    "resize_images": ("image", lambda x, xp: F.resize_images(x, (5, 6))),
    "unpooling_2d": ("image", lambda x, xp: F.unpooling_2d(x, 2)),
    "im2col": ("image", lambda x, xp: F.im2col(x, 3)),
    "normalize": ("matrix", lambda x, xp: F.normalize(x)),
}

LINKS = {
    # name: (shape of x, function that makes the link, function that calls it)
    "linear": ("matrix", lambda: L.Linear(4, 5), None),
    "bilinear": ("matrix", lambda: L.Bilinear(4, 4, 2), lambda link, x: link(x, x)),
    "convolution": ("image", lambda: L.Convolution2D(4, 6, 3, pad=1), None),
    "strided_convolution": ("image", lambda: L.Convolution2D(4, 6, 3, stride=2), None),
    "grouped_convolution": ("image", lambda: L.Convolution2D(4, 6, 3, groups=2), None),
    "dilated_convolution": ("image", lambda: L.DilatedConvolution2D(4, 6, 3, dilate=2), None),
    "deconvolution": ("image", lambda: L.Deconvolution2D(4, 6, 3, stride=2), None),
    "depthwise_convolution": ("image", lambda: L.DepthwiseConvolution2D(4, 2, 3), None),
    "batch_normalization": ("image", lambda: L.BatchNormalization(4), None),
    "layer_normalization": ("matrix", lambda: L.LayerNormalization(4), None),
    "group_normalization": ("image", lambda: L.GroupNormalization(2, 4), None),
    "scale": ("matrix", lambda: L.Scale(W_shape=(4,)), None),
    "prelu": ("matrix", lambda: L.PReLU(), None),
    "maxout": ("matrix", lambda: L.Maxout(4, 3, 2), None),
    "lstm": ("sequence", lambda: L.LSTM(3, 4), lambda link, x: link(x) + link(x)),
    "gru": ("sequence", lambda: L.StatefulGRU(3, 4), lambda link, x: link(x) + link(x)),
    "n_step_lstm": (
        "sequence",
        lambda: L.NStepLSTM(2, 3, 4, 0.0),
        lambda link, x: F.concat(link(None, None, [x, x[:2]])[2], axis=0),
    ),
    "embed_id": (
        "matrix",
        lambda: L.EmbedID(5, 4),
        lambda link, x: link(link.xp.asarray(LABELS)) * x,
    ),
    "negative_sampling": (
        "matrix",
        lambda: L.NegativeSampling(4, [10, 5, 3, 2], 2),
        lambda link, x: link(x, link.xp.asarray(LABELS)),
    ),
    "hierarchical_softmax": (
        "matrix",
        lambda: L.BinaryHierarchicalSoftmax(4, ((0, 1), (2, 3))),
        lambda link, x: link(x, link.xp.asarray(LABELS)),
    ),
}
# Chainer has these for float32 only.
ONLY_FLOAT32 = {"resize_images", "bilinear"}
# These draw samples on the device, which differ from those in host memory.
RANDOM = {"negative_sampling"}


def with_dtypes(names):
    return [(n, d) for n in names for d in TOLERANCES if d == "float32" or n not in ONLY_FLOAT32]


def inputs(shape, dtype):
    values = np.random.RandomState(0).uniform(-1, 1, SHAPES[shape])
    return values.astype(dtype)


def run(device, x, function):
    """Return the values and the gradient, in host memory."""
    device.use()
    variable = chainer.Variable(device.send(x))
    y = function(variable)
    F.sum(y * y).backward()
    return [np.asarray(cuda.to_cpu(array), "f8") for array in (y.array, variable.grad)]


def check(device, x, dtype, function):
    wide = x.astype("f4")
    expected = run(chainer.get_device("@numpy"), wide, lambda v: function(v, "f4", "@numpy"))
    actual = run(device, x, lambda v: function(v, dtype, device))
    scale = max(1.0, *(float(np.abs(array).max(initial=0)) for array in expected))
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=TOLERANCES[dtype] * scale, rtol=0)


@pytest.mark.parametrize(("name", "dtype"), with_dtypes(FUNCTIONS))
def test_function(device, name, dtype):
    shape, function = FUNCTIONS[name]
    x = inputs(shape, dtype)
    check(device, x, dtype, lambda v, _, where: function(v, chainer.get_device(where).xp))


@pytest.mark.parametrize(("name", "dtype"), with_dtypes(LINKS))
def test_link(device, name, dtype):
    shape, make, forward = LINKS[name]

    def apply(variable, dtype, where):
        np.random.seed(0)
        with chainer.using_config("dtype", np.dtype(dtype)):
            link = make()
        link.to_device(where)
        link.cleargrads()
        return link(variable) if forward is None else forward(link, variable)

    x = inputs(shape, dtype)
    if name in RANDOM:
        values = run(device, x, lambda variable: apply(variable, dtype, device))
        assert all(np.isfinite(array).all() for array in values)
    else:
        check(device, x, dtype, apply)


# Functions of an array and a number.
WITH_NUMBERS = {
    "clip": ("matrix", lambda x, number: F.clip(x, -number, number)),
    "huber_loss": ("matrix", lambda x, number: F.huber_loss(x, 3 * x, number)),
    "elu": ("matrix", lambda x, number: F.elu(x, number)),
    "selu": ("matrix", lambda x, number: F.selu(x, number, number)),
    "leaky_relu": ("matrix", lambda x, number: F.leaky_relu(x, number)),
    "softplus": ("matrix", lambda x, number: F.softplus(x, number)),
    "normalize": ("matrix", lambda x, number: F.normalize(x, number)),
    "power": ("matrix", lambda x, number: (x * x) ** number + number**x),
    "divide": ("matrix", lambda x, number: x / number + number / (x * x + 1)),
    "triplet": ("matrix", lambda x, number: F.triplet(x, 2 * x, -x, number)),
    "local_response_normalization": (
        "image",
        lambda x, number: F.local_response_normalization(x, 3, number, number, number),
    ),
    "layer_normalization": (
        "matrix",
        lambda x, number: F.layer_normalization(x, x[0], x[1], number),
    ),
    "fixed_batch_normalization": (
        "matrix",
        lambda x, number: F.fixed_batch_normalization(x, x[0], x[1], x[2], x[0] ** 2, number),
    ),
}


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5)], ids=repr)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_number_of_numpys_widens_no_array(device, name, dtype, number):
    shape, function = WITH_NUMBERS[name]
    device.use()
    variable = chainer.Variable(device.send(inputs(shape, dtype)))
    y = function(variable, number)
    F.sum(y * y).backward()
    assert y.dtype == variable.grad.dtype == dtype
    plain = run(device, inputs(shape, dtype), lambda x: function(x, 0.5))
    for found, expected in zip((y.array, variable.grad), plain, strict=True):
        np.testing.assert_array_equal(cuda.to_cpu(found), expected)


def test_max_pooling_returns_indices(device):
    x = np.random.default_rng(0).permutation(2 * 4 * 81).reshape(2, 4, 9, 9).astype(np.float32)
    _, found = F.max_pooling_2d(device.send(x), 3, 2, pad=1, return_indices=True)
    device.use()
    padded = np.pad(x, ((0, 0), (0, 0), (1, 2), (1, 2)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    expected = windows.reshape(*windows.shape[:4], 9).argmax(-1)
    assert found.dtype == np.int32 and isinstance(found, device.xp.ndarray)
    np.testing.assert_array_equal(cuda.to_cpu(found), expected[:, :, :5, :5])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("w_ndim", [0, 1, 2, 3])
def test_prelu_and_both_derivatives(device, w_ndim, dtype):
    device.use()
    random = np.random.default_rng(0)
    x, w = random.normal(size=(4, 3, 2, 5)), random.normal(size=(3, 2, 5)[:w_ndim])
    gy, ggx = random.normal(size=(2, 4, 3, 2, 5))

    def derive(send, dtype):
        xs = [chainer.Variable(send(each.astype(dtype))) for each in (x, w, gy)]
        y = F.prelu(xs[0], xs[1])
        first = chainer.grad([y], xs[:2], [xs[2]], enable_double_backprop=True)
        scaled = F.sum(first[0] * send(ggx.astype(dtype))) + F.sum(first[1])
        found = [y, *first, *chainer.grad([scaled], xs)]
        return [np.asarray(cuda.to_cpu(each.array), "d") for each in found]

    expected = derive(np.asarray, np.float64)
    for got, right in zip(derive(device.send, np.dtype(dtype)), expected, strict=True):
        scale = max(1.0, float(np.abs(right).max()))
        np.testing.assert_allclose(got, right, rtol=0, atol=TOLERANCES[dtype] * scale)


def test_training_in_mixed_precision(device):
    """Train a small network with an optimizer that keeps float32 copies."""
    device.use()
    np.random.seed(0)
    with chainer.using_config("dtype", chainer.mixed16):
        model = L.Classifier(chainer.Sequential(L.Linear(4, 8), F.relu, L.Linear(8, 4)))
        model.to_device(device)
        optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
        optimizer.use_fp32_update()
        optimizer.loss_scaling()
        x, t = device.send(inputs("matrix", "float16")), device.send(LABELS)
        losses = []
        for _ in range(20):
            optimizer.update(model, x, t)
            losses.append(float(model.loss.array))
    assert losses[-1] < losses[0]
