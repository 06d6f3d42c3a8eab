"""Functions of images, and how tests compare them with float64 on the CPU."""

import chainer
import chainer.functions as F
import numpy as np
from chainer.backends import cuda

SHAPE = (2, 8, 3, 5)
FUNCTIONS = {
    # name: (number of arrays, function)
    "relu": (1, F.relu),
    "leaky relu": (1, F.leaky_relu),
    "leaky relu, negative": (1, lambda x: F.leaky_relu(x, -0.5)),
    "clipped relu": (1, lambda x: F.clipped_relu(x, 0.25)),
    "elu": (1, F.elu),
    "elu, negative": (1, lambda x: F.elu(x, -0.5)),
    "sigmoid": (1, F.sigmoid),
    "tanh": (1, F.tanh),
    "with a number": (1, lambda x: 1 - (-x * 2 + 1)),
    "dropout": (1, lambda x: F.dropout(x, mask=2 * (x.array > 0).astype(x.dtype))),
    "cast": (1, lambda x: F.cast(F.cast(F.relu(x), "f4"), x.dtype)),
    "add": (2, lambda x, y: x + y),
    "add three": (3, F.add),
    "subtract": (2, lambda x, y: x - y),
    "multiply": (2, lambda x, y: x * y),
    "concatenate": (2, lambda x, y: F.concat([x, y, x])),
    "concatenate rows": (2, lambda x, y: F.concat([x, y], axis=-2)),
    "met gradients": (1, lambda x: F.relu(x) + F.tanh(x) + F.sigmoid(x)),
}
NORMALIZE = {
    # name: (number of arrays by channel, function)
    "in training": (2, lambda *inputs: F.batch_normalization(*inputs, eps=0.1)),
    "given statistics": (4, F.fixed_batch_normalization),
}


def draw(n, shape=SHAPE):
    random = np.random.default_rng(0)
    # Without values near 0, where float16 may round to another side of a bend.
    return [(random.integers(1, 99, shape) - 50.5) / 64 for _ in range(n)]


def differentiate(function, arrays, weights):
    """Return a function's value, its gradients, and those of the squares of these."""
    inputs = [chainer.Variable(array) for array in arrays]
    y = function(*inputs)
    gradients = chainer.grad(
        [y], inputs, [chainer.Variable(weights(y))], enable_double_backprop=True
    )
    again = chainer.grad([sum(F.cast(F.sum(g * g), "d") for g in gradients)], inputs)
    again = [found for found in again if found is not None]  # those of a linear function
    return [found.array for found in (y, *gradients)], [found.array for found in again]


def weights(arrange, dtype):
    return lambda y: arrange(draw(1, y.shape)[0].astype(dtype))


def assert_close(found, expected):
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(cuda.to_cpu(got).astype("d"), wanted, rtol=0, atol=1e-2 * scale)
