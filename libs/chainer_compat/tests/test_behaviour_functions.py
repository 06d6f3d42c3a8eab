"""Chainer's functions on this stack: values against NumPy in float64, and gradients.

The gradients are compared with central differences along one random direction.
"""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from scipy import special

RANDOM = np.random.RandomState(7)


def signed(*shape):
    return RANDOM.uniform(-1, 1, shape)


def positive(*shape):
    return RANDOM.uniform(0.5, 1.5, shape)


def softmax(x, axis=1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normalized(x, axes, eps):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def windows(x, size):
    """Return all windows of an image: (batch, channels, y, x, window y, window x)."""
    return np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))


def padded(xs, value):
    result = np.full((len(xs), max(map(len, xs)), *xs[0].shape[1:]), value)
    for row, x in zip(result, xs, strict=True):
        row[: len(x)] = x
    return result


def lrn(x, n, k, alpha, beta):
    squares = np.pad(x**2, ((0, 0), (n // 2, n // 2), (0, 0), (0, 0)))
    total = sum(squares[:, i : i + x.shape[1]] for i in range(n))
    return x / (k + alpha * total) ** beta


M, V, IMAGE = signed(3, 4), signed(4), signed(2, 3, 6, 6)
POSITIVE = positive(3, 4)
LABELS = np.array([2, 0, 3], np.int32)
ROWS = np.arange(3)
SPD = np.eye(4) * 3 + 0.1 * signed(4, 4)
BOX = np.array([[0, 0, 0, 3, 3]], float)

# name: (Chainer's function, the same in NumPy, the arguments to differentiate)
CASES = {
    # arithmetic
    "add": (lambda x, y: x + y, np.add, [M, POSITIVE]),
    "add scalar": (lambda x: x + np.float64(2), lambda x: x + 2, [M]),
    "subtract from": (lambda x: 2 - x, lambda x: 2 - x, [M]),
    "multiply": (lambda x, y: x * y, np.multiply, [M, POSITIVE]),
    "multiply scalar": (lambda x: np.float64(3) * x, lambda x: 3 * x, [M]),
    "divide": (lambda x, y: x / y, np.divide, [M, POSITIVE]),
    "divide by scalar": (lambda x: x / 3, lambda x: x / 3, [M]),
    "power": (lambda x, y: x**y, np.power, [POSITIVE, M]),
    "power scalar": (lambda x: x**3, lambda x: x**3, [M]),
    "scalar to the power": (lambda x: 2**x, lambda x: 2**x, [M]),
    "negative": (lambda x: -x, np.negative, [M]),
    "absolute": (lambda x: abs(x), np.abs, [M]),
    "matmul": (lambda x, y: x @ y, np.matmul, [M, signed(4, 2)]),
    # elementwise
    **{
        name: (getattr(F, name), getattr(np, reference), [x])
        for name, reference, x in (
            ("exp", "exp", M),
            ("expm1", "expm1", M),
            ("log", "log", POSITIVE),
            ("log10", "log10", POSITIVE),
            ("log1p", "log1p", POSITIVE),
            ("log2", "log2", POSITIVE),
            ("sqrt", "sqrt", POSITIVE),
            ("square", "square", M),
            ("sin", "sin", M),
            ("cos", "cos", M),
            ("tan", "tan", M),
            ("arcsin", "arcsin", M * 0.9),
            ("arccos", "arccos", M * 0.9),
            ("arctan", "arctan", M),
            ("sinh", "sinh", M),
            ("cosh", "cosh", M),
            ("tanh", "tanh", M),
            ("floor", "floor", M),
            ("ceil", "ceil", M),
            ("fix", "trunc", M * 3),
            ("sign", "sign", M),
        )
    },
    **{
        name: (getattr(F, name), getattr(special, reference), [x])
        for name, reference, x in (
            ("erf", "erf", M),
            ("erfc", "erfc", M),
            ("erfinv", "erfinv", M * 0.9),
            ("lgamma", "gammaln", POSITIVE),
            ("digamma", "digamma", POSITIVE),
            ("ndtr", "ndtr", M),
            ("log_ndtr", "log_ndtr", M),
        )
    },
    "rsqrt": (F.rsqrt, lambda x: x**-0.5, [POSITIVE]),
    "arctan2": (F.arctan2, np.arctan2, [M, POSITIVE]),
    "fmod": (lambda x: F.fmod(x, x * 0 + 0.6), lambda x: np.fmod(x, 0.6), None),
    "clip": (lambda x: F.clip(x, -0.5, np.float64(0.5)), lambda x: x.clip(-0.5, 0.5), [M]),
    "maximum": (F.maximum, np.maximum, [M, POSITIVE - 1]),
    "minimum": (F.minimum, np.minimum, [M, POSITIVE - 1]),
    "squared_difference": (F.squared_difference, lambda x, y: (x - y) ** 2, [M, POSITIVE]),
    # activations
    "relu": (F.relu, lambda x: x.clip(0), [M]),
    "relu6": (lambda x: F.relu6(x * 9), lambda x: (x * 9).clip(0, 6), [M]),
    "clipped_relu": (lambda x: F.clipped_relu(x, 0.5), lambda x: x.clip(0, 0.5), [M]),
    "leaky_relu": (
        lambda x: F.leaky_relu(x, np.float64(0.2)), lambda x: np.where(x > 0, x, 0.2 * x), [M]
    ),
    "elu": (lambda x: F.elu(x, 0.7), lambda x: np.where(x > 0, x, 0.7 * np.expm1(x)), [M]),
    "selu": (
        lambda x: F.selu(x, 1.6, 1.1),
        lambda x: 1.1 * np.where(x > 0, x, 1.6 * np.expm1(x)),
        [M],
    ),
    "sigmoid": (F.sigmoid, sigmoid, [M]),
    "hard_sigmoid": (F.hard_sigmoid, lambda x: (0.2 * x + 0.5).clip(0, 1), [M]),
    "softplus": (lambda x: F.softplus(x, 2), lambda x: np.log1p(np.exp(2 * x)) / 2, [M]),
    "swish": (F.swish, lambda x, b: x * sigmoid(b * x), [M, V]),
    "softmax": (F.softmax, softmax, [M]),
    "log_softmax": (F.log_softmax, lambda x: np.log(softmax(x)), [M]),
    "prelu": (F.prelu, lambda x, w: np.where(x > 0, x, w * x), [M, V]),
    "maxout": (lambda x: F.maxout(x, 2), lambda x: x.reshape(3, 2, 2).max(2), [M]),
    "crelu": (F.crelu, lambda x: np.concatenate([x.clip(0), (-x).clip(0)], 1), [M]),
    # reductions
    "sum": (lambda x: F.sum(x, 1, keepdims=True), lambda x: x.sum(1, keepdims=True), [M]),
    "mean": (lambda x: F.mean(x, 0), lambda x: x.mean(0), [M]),
    "average": (
        lambda x, w: F.average(x, 1, w), lambda x, w: np.average(x, 1, w), [M, positive(4)]
    ),
    "max": (lambda x: F.max(x, 1), lambda x: x.max(1), [M]),
    "min": (lambda x: F.min(x, (0, 1)), lambda x: x.min(), [M]),
    "prod": (lambda x: F.prod(x, 1), lambda x: x.prod(1), [POSITIVE]),
    "cumsum": (lambda x: F.cumsum(x, 1), lambda x: x.cumsum(1), [M]),
    "cumprod": (lambda x: F.cumprod(x, 1), lambda x: x.cumprod(1), [POSITIVE]),
    "logsumexp": (lambda x: F.logsumexp(x, 1), lambda x: np.log(np.exp(x).sum(1)), [M]),
    "batch_l2_norm_squared": (F.batch_l2_norm_squared, lambda x: (x**2).sum(1), [M]),
    # linear algebra
    "linear": (F.linear, lambda x, w, b: x @ w.T + b, [M, signed(2, 4), signed(2)]),
    "batched matmul": (
        lambda x, y: F.matmul(x, y, transb=True),
        lambda x, y: x @ y.transpose(0, 2, 1),
        [signed(2, 3, 4), signed(2, 5, 4)],
    ),
    "einsum": (
        lambda x, y: F.einsum("ij,kj->ik", x, y),
        lambda x, y: np.einsum("ij,kj->ik", x, y),
        [M, signed(2, 4)],
    ),
    "tensordot": (
        lambda x, y: F.tensordot(x, y, 1), lambda x, y: np.tensordot(x, y, 1), [M, signed(4, 2, 2)]
    ),
    "inv": (F.inv, np.linalg.inv, [SPD]),
    "det": (F.det, np.linalg.det, [SPD]),
    "cholesky": (
        lambda x: F.cholesky(F.matmul(x, x, transb=True)),
        lambda x: np.linalg.cholesky(x @ x.T),
        [SPD],
    ),
    # shapes
    "reshape": (lambda x: F.reshape(x, (2, -1)), lambda x: x.reshape(2, -1), [M]),
    "transpose": (lambda x: F.transpose(x), np.transpose, [M]),
    "moveaxis": (lambda x: F.moveaxis(x, 1, 3), lambda x: np.moveaxis(x, 1, 3), [IMAGE]),
    "flip": (lambda x: F.flip(x, 1), lambda x: x[:, ::-1], [M]),
    "concat": (lambda *xs: F.concat(xs, 1), lambda *xs: np.concatenate(xs, 1), [M, POSITIVE]),
    "stack": (lambda *xs: F.stack(xs, 1), lambda *xs: np.stack(xs, 1), [M, POSITIVE]),
    "split_axis": (lambda x: F.split_axis(x, [1, 3], 1)[1], lambda x: x[:, 1:3], [M]),
    "separate": (lambda x: F.separate(x, 1)[2], lambda x: x[:, 2], [M]),
    "broadcast_to": (
        lambda x: F.broadcast_to(x, (2, 4)), lambda x: np.broadcast_to(x, (2, 4)), [V]
    ),
    "tile": (lambda x: F.tile(x, (2, 1)), lambda x: np.tile(x, (2, 1)), [M]),
    "repeat": (lambda x: F.repeat(x, 2, 1), lambda x: x.repeat(2, 1), [M]),
    "squeeze": (lambda x: F.squeeze(F.expand_dims(x, 1)), lambda x: x, [M]),
    "pad": (lambda x: F.pad(x, 1, "constant"), lambda x: np.pad(x, 1), [M]),
    "pad_sequence": (
        lambda *xs: F.pad_sequence(xs, padding=np.float64(0.5)),
        lambda *xs: padded(xs, 0.5),
        [M, M[:2]],
    ),
    "where": (
        lambda x, y: F.where(M > 0, x, y), lambda x, y: np.where(M > 0, x, y), [M, POSITIVE]
    ),
    "get_item": (lambda x: x[1:, ::2], lambda x: x[1:, ::2], [M]),
    "get_item by arrays": (lambda x: x[ROWS, LABELS], lambda x: x[ROWS, LABELS], [M]),
    "select_item": (lambda x: F.select_item(x, LABELS), lambda x: x[ROWS, LABELS], [M]),
    "embed_id": (lambda w: F.embed_id(LABELS, w), lambda w: w[LABELS], [signed(4, 2)]),
    "diagonal": (F.diagonal, np.diagonal, [SPD]),
    "as_strided": (
        lambda x: F.as_strided(x, (3, 2), (1, 1), 0),
        lambda x: np.stack([x[:-1], x[1:]], 1),
        [V],
    ),
    "depth2space": (
        lambda x: F.depth2space(x, 2),
        lambda x: x.reshape(1, 2, 2, 3, 2, 2).transpose(0, 3, 4, 1, 5, 2).reshape(1, 3, 4, 4),
        [signed(1, 12, 2, 2)],
    ),
    # images
    "convolution_2d": (
        F.convolution_2d,
        lambda x, w, b: np.einsum("bcyxij,ocij->boyx", windows(x, 3), w) + b[:, None, None],
        [IMAGE, signed(2, 3, 3, 3), signed(2)],
    ),
    "deconvolution_2d": (
        F.deconvolution_2d,
        lambda x, w: np.einsum(
            "bcyxij,coij->boyx", windows(np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2))), 3),
            w[:, :, ::-1, ::-1],
        ),
        [IMAGE, signed(3, 2, 3, 3)],
    ),
    "depthwise_convolution_2d": (
        F.depthwise_convolution_2d,
        lambda x, w: np.einsum("bcyxij,cij->bcyx", windows(x, 3), w[0]),
        [IMAGE, signed(1, 3, 3, 3)],
    ),
    "max_pooling_2d": (
        lambda x: F.max_pooling_2d(x, 2),
        lambda x: windows(x, 2)[:, :, ::2, ::2].max((4, 5)),
        [IMAGE],
    ),
    "average_pooling_2d": (
        lambda x: F.average_pooling_2d(x, 2),
        lambda x: windows(x, 2)[:, :, ::2, ::2].mean((4, 5)),
        [IMAGE],
    ),
    "unpooling_2d": (
        lambda x: F.unpooling_2d(x, 2, cover_all=False),
        lambda x: x.repeat(2, 2).repeat(2, 3),
        [IMAGE],
    ),
    "roi_pooling_2d": (
        lambda x: F.roi_pooling_2d(x, BOX.astype(x.dtype), 2, 2, 1.0),
        lambda x: windows(x[:1, :, :4, :4], 2)[:, :, ::2, ::2].max((4, 5)),
        [IMAGE],
    ),
    "local_response_normalization": (
        F.local_response_normalization, lambda x: lrn(x, 5, 2, 1e-4, 0.75), [IMAGE]
    ),
    # normalization
    "normalize": (
        F.normalize, lambda x: x / (np.sqrt((x**2).sum(1, keepdims=True)) + 1e-5), [M]
    ),
    "layer_normalization": (
        F.layer_normalization, lambda x, g, b: normalized(x, 1, 1e-5) * g + b, [M, positive(4), V]
    ),
    "batch_normalization": (
        lambda x, g, b: F.batch_normalization(x, g, b, eps=np.float64(1e-3)),
        lambda x, g, b: normalized(x, 0, 1e-3) * g + b,
        [M, positive(4), V],
    ),
    "fixed_batch_normalization": (
        lambda x, g, b, m, v: F.fixed_batch_normalization(x, g, b, m, v, 1e-3),
        lambda x, g, b, m, v: (x - m) / np.sqrt(v + 1e-3) * g + b,
        [M, positive(4), V, signed(4), positive(4)],
    ),
    "group_normalization": (
        lambda x, g, b: F.group_normalization(x, 2, g, b, np.float64(1e-5)),
        lambda x, g, b: normalized(x.reshape(3, 2, 2), 2, 1e-5).reshape(3, 4) * g + b,
        [M, positive(4), V],
    ),
    # losses
    "softmax_cross_entropy": (
        lambda x: F.softmax_cross_entropy(x, LABELS),
        lambda x: -np.log(softmax(x))[ROWS, LABELS].mean(),
        [M],
    ),
    "weighted softmax_cross_entropy": (
        lambda x: F.softmax_cross_entropy(
            x, LABELS, class_weight=np.arange(4, dtype=x.dtype), reduce="no"
        ),
        lambda x: -(np.log(softmax(x)) * np.arange(4))[ROWS, LABELS],
        [M],
    ),
    "sigmoid_cross_entropy": (
        lambda x: F.sigmoid_cross_entropy(x, (POSITIVE > 1).astype(np.int32)),
        lambda x: -np.log(np.where(POSITIVE > 1, sigmoid(x), sigmoid(-x))).mean(),
        [M],
    ),
    "mean_squared_error": (
        F.mean_squared_error, lambda x, y: ((x - y) ** 2).mean(), [M, POSITIVE]
    ),
    "mean_absolute_error": (F.mean_absolute_error, lambda x, y: abs(x - y).mean(), [M, POSITIVE]),
    "huber_loss": (
        lambda x, y: F.huber_loss(x, y, np.float64(0.5), reduce="no"),
        lambda x, y: np.where(
            abs(x - y) < 0.5, (x - y) ** 2 / 2, 0.5 * (abs(x - y) - 0.25)
        ),
        [M, POSITIVE],
    ),
    "hinge": (
        lambda x: F.hinge(x, LABELS),
        lambda x: (1 + np.where(np.arange(4) == LABELS[:, None], -x, x)).clip(0).sum() / 3,
        [M],
    ),
    "gaussian_kl_divergence": (
        F.gaussian_kl_divergence,
        lambda m, s: ((m**2 + np.exp(s) - s - 1) / 2).sum(),
        [M, signed(3, 4)],
    ),
    "bernoulli_nll": (
        lambda x: F.bernoulli_nll(x * 0 + 0.3, x),
        lambda x: -(0.3 * np.log(sigmoid(x)) + 0.7 * np.log(sigmoid(-x))).sum(),
        None,
    ),
    "triplet": (
        F.triplet,
        lambda a, p, n: (((a - p) ** 2).sum(1) - ((a - n) ** 2).sum(1) + 0.2).clip(0).mean(),
        [M, M + 0.3, signed(3, 4)],
    ),
    # recurrent
    "lstm": (
        lambda c, x: F.lstm(c, x)[1],
        lambda c, x: sigmoid(x[:, 3::4])
        * np.tanh(
            np.tanh(x[:, 0::4]) * sigmoid(x[:, 1::4]) + c * sigmoid(x[:, 2::4])
        ),
        [signed(3, 2), signed(3, 8)],
    ),
}  # fmt: skip


#: LAPACK and SciPy have no float16.
NO_FLOAT16 = {"cholesky", "inv", "det", "erfinv"}
TOLERANCES = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-10}


def arrays_of(name, dtype):
    return [np.array(x, dtype) for x in CASES[name][2] or [M]]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in CASES for d in TOLERANCES if d != "float16" or n not in NO_FLOAT16],
)
def test_value(name, dtype):
    function, reference, _ = CASES[name]
    arrays = arrays_of(name, dtype)
    y = function(*map(chainer.Variable, arrays))
    expected = reference(*(x.astype(np.float64) for x in arrays))
    assert y.dtype == dtype
    assert y.shape == np.shape(expected)
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][2]])
def test_gradient(name):
    function = CASES[name][0]
    arrays = arrays_of(name, np.float64)
    random = np.random.RandomState(3)

    def loss(arrays):
        variables = [chainer.Variable(x) for x in arrays]
        y = function(*variables)
        weights = np.cos(np.arange(y.size)).reshape(y.shape)
        return F.sum(y * weights), variables

    total, variables = loss(arrays)
    total.backward()
    directions = [random.uniform(-1, 1, x.shape) for x in arrays]
    slope = 0.0
    for variable, direction in zip(variables, directions, strict=True):
        # A missing gradient means zero, as for floor().
        if variable.grad is not None:
            assert variable.grad.dtype == np.float64
            slope += (variable.grad * direction).sum()
    h = 1e-6
    ends = [
        loss([x + s * h * d for x, d in zip(arrays, directions, strict=True)])[0].item()
        for s in (1, -1)
    ]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["exp", "softmax", "matmul", "layer_normalization", "lstm"])
def test_gradients_of_float32_are_float32(name):
    variables = [chainer.Variable(x) for x in arrays_of(name, np.float32)]
    F.sum(CASES[name][0](*variables)).backward()
    assert [v.grad.dtype for v in variables] == [np.float32] * len(variables)
