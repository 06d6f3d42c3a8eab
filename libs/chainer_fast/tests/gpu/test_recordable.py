"""Products and dropout inside a CUDA graph give the numbers of NumPy, again at each launch."""

import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainer_fast.graphs.drawing import Draws
from libs.chainer_fast.tests.reference_philox import WORD, kept

pytestmark = pytest.mark.gpu

TOLERANCE = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-12}


@pytest.fixture
def record(device):
    """Return a function that records another; its result can be launched, and is on the host."""
    device.use()
    cupy = device.xp
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)

    def record(draws, function):
        def run():
            with draws.step():
                return function()

        device_ = cupy.cuda.Device()
        device_.synchronize()
        with stream, cupy.cuda.using_allocator(pool.malloc):
            run()  # compiles kernels, and makes the workspace
            stream.synchronize()
            stream.begin_capture()
            try:
                arrays = run()
            finally:
                graph = stream.end_capture()

        def launch():
            device_.synchronize()
            graph.launch(stream)
            stream.synchronize()
            return [array.get() for array in arrays]

        return launch

    return record


def draws_on(device, seed=0, step=0):
    return Draws(device.xp.array([seed, step], np.uint64))


PRODUCTS = {
    "matmul": (lambda a, b: a @ b, [(64, 37), (37, 130)]),
    "matmul transposed": (lambda a, b: a.T @ b.T, [(37, 64), (130, 37)]),
    "with gaps": (lambda a, b: a[:, ::2] @ b[::2], [(64, 74), (74, 130)]),
    "a batch": (lambda a, b: a @ b, [(3, 2, 16, 37), (3, 2, 37, 8)]),
    "a batch by one": (lambda a, b: a @ b, [(3, 2, 16, 37), (37, 8)]),
    "heads": (lambda a, b: a.swapaxes(1, 2) @ b.swapaxes(1, 2), [(3, 16, 2, 37), (3, 37, 2, 8)]),
    "dot": (lambda a, b: a.dot(b), [(64, 37), (37,)]),
    "vectors": (lambda a, b: a.dot(b), [(1000,), (1000,)]),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, dtype, record, device):
    product, shapes = PRODUCTS[name]
    random = np.random.default_rng(0)
    on_host = [random.normal(size=shape).astype(dtype) for shape in shapes]
    a, b = (device.xp.zeros(shape, dtype) for shape in shapes)
    launch = record(draws_on(device), lambda: [product(a, b)])
    for factor in (1, 2):
        a.set(on_host[0])
        b.set((factor * on_host[1]).astype(dtype))
        (found,) = launch()
        exact = factor * product(*(array.astype("d") for array in on_host))
        assert found.dtype == dtype
        scale = np.abs(exact).max()
        np.testing.assert_allclose(found / scale, exact / scale, rtol=0, atol=TOLERANCE[dtype])


FUNCTIONS = {
    "linear": (F.linear, [(4, 7), (5, 7), (5,)]),
    "matmul": (F.matmul, [(3, 4, 7), (3, 7, 5)]),
    "matmul transposed": (lambda a, b: F.matmul(a, b, True, True), [(7, 4), (5, 7)]),
    "convolution": (lambda x, w: F.convolution_2d(x, w, pad=1), [(2, 3, 8, 8), (4, 3, 3, 3)]),
    "groups": (lambda x, w: F.convolution_2d(x, w, groups=2), [(2, 4, 8, 8), (6, 2, 3, 3)]),
    "deconvolution": (F.deconvolution_2d, [(2, 3, 8, 8), (3, 4, 3, 3)]),
    "convolution of texts": (F.convolution_1d, [(2, 3, 9), (4, 3, 3)]),
    "bilinear": (F.bilinear, [(4, 5), (4, 6), (5, 6, 3)]),
    "einsum": (lambda a, b: F.einsum("ij,kj->ik", a, b), [(4, 7), (5, 7)]),
    "mean squared error": (F.mean_squared_error, [(4, 7), (4, 7)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_gradients(name, record, device):
    function, shapes = FUNCTIONS[name]
    random = np.random.default_rng(0)
    on_host = [random.normal(size=shape) for shape in shapes]

    def compute(arrays):
        inputs = [chainer.Variable(array) for array in arrays]
        y = function(*inputs)
        gradients = chainer.grad([y], inputs, [y])
        return [variable.array for variable in (y, *gradients)]

    arrays = [device.send(array.astype("f")) for array in on_host]
    launch = record(draws_on(device), lambda: compute(arrays))
    with chainer.using_config("use_ideep", "never"):
        expected = compute(on_host)
    for found, exact in zip(launch(), expected, strict=True):
        scale = np.abs(exact).max()
        np.testing.assert_allclose(found / scale, exact / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_launch_drops_other_elements(dtype, record, device):
    seed, n_elements = 5 * WORD + 3, 1001
    draws = draws_on(device, seed)
    x = chainer.Variable(device.xp.arange(n_elements, dtype=dtype).reshape(7, 143).T)

    def drop():
        y, mask = F.dropout(x, 0.3, return_mask=True)
        (gradient,) = chainer.grad([y], [x], [x])
        again = F.dropout(x, 0.5)
        return y.array, mask, gradient.array, again.array

    launch, on_host = record(draws, drop), x.array.get()
    for step in (0, 1, 2 * WORD):
        draws.key[1] = step
        y, mask, gradient, again = launch()
        scale = x.dtype.type(1 / 0.7)
        expected = kept(n_elements, 0.3, seed, step, 0).reshape(x.shape) * scale
        np.testing.assert_array_equal(mask, expected)
        np.testing.assert_array_equal(y, on_host * mask)
        np.testing.assert_array_equal(gradient, on_host * mask)
        second = kept(n_elements, 0.5, seed, step, 1).reshape(x.shape)
        np.testing.assert_array_equal(again, on_host * (second * x.dtype.type(2)))
