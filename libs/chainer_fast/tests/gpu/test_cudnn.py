"""cuDNN on a GPU, against Chainer's own code in host memory, in float64."""

import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainer_fast.channels_last import layout
from chainer_fast.cudnn.normalization import the_normalizer
from chainer_fast.cudnn.runner import the_runner

pytestmark = pytest.mark.gpu

TOLERANCES = {"float16": 1e-2, "float32": 1e-4}
each_way = pytest.mark.parametrize(
    "dtype, mode",
    [("float16", None), ("float32", None), ("float16", layout.MODE)],
    ids=["float16", "float32", "channels last"],
)
SHAPES = {
    # name: (shape of x, output channels, size of the filter, other arguments)
    "first of ResNet-50": ((2, 3, 64, 64), 64, 7, {"stride": 2, "pad": 3}),
    "3x3 of ResNet-50": ((2, 64, 14, 14), 64, 3, {"pad": 1}),
    "1x1 of ResNet-50": ((2, 256, 14, 14), 64, 1, {}),
    "strided of ResNet-50": ((2, 128, 14, 14), 256, 1, {"stride": 2}),
    "odd": ((3, 5, 11, 7), 7, 3, {"stride": (2, 1), "pad": (1, 2)}),
    "a rest that is left out": ((2, 8, 8, 8), 8, 3, {"stride": 2}),
    "dilated": ((2, 16, 20, 20), 8, 3, {"dilate": 2, "pad": 2}),
    "grouped": ((2, 8, 9, 8), 6, 3, {"groups": 2, "pad": 1}),
    "depthwise": ((2, 32, 14, 14), 32, 3, {"groups": 32, "pad": 1}),
    "more padding than filter": ((1, 2, 3, 3), 2, 2, {"pad": 4, "stride": 3}),
    "one of each": ((1, 1, 1, 1), 1, 1, {}),
}
NORMALIZED = {
    "first of ResNet-50": (2, 64, 32, 32),
    "last of ResNet-50": (2, 2048, 7, 7),
    "no power of two": (3, 24, 13, 5),
    "one image": (1, 8, 3, 3),
    "odd": (3, 7, 5, 9),
    "two values": (2, 5, 1, 1),
}


@pytest.fixture
def done(device, monkeypatch, by_cudnn):
    """Send Chainer's functions to cuDNN; return a list that records what it computes."""
    device.use()
    done = []
    runner = the_runner()
    run = runner.run

    def watched(problem, *inputs):
        done.append(problem)
        return run(problem, *inputs)

    def watch(name):
        function = getattr(the_normalizer(), name)
        watching = lambda *inputs: done.append(name) or function(*inputs)  # noqa: E731
        monkeypatch.setattr(the_normalizer(), name, watching)

    monkeypatch.setattr(runner, "run", watched)
    for name in ("normalize", "gradients"):
        watch(name)
    return done


def draw(*shapes):
    random = np.random.RandomState(0)
    return [random.uniform(-1, 1, shape) for shape in shapes]


def differentiate(function, arrays):
    """Return a function's value, its gradients, and gradients of their squares."""
    inputs = [chainer.Variable(array) for array in arrays]
    y = function(*inputs)
    loss = F.sum(F.cast(y * y, "float64"))
    gradients = chainer.grad([loss], inputs, enable_double_backprop=True)
    squares = sum(F.sum(F.cast(gradient, "float64") ** 2) for gradient in gradients)
    again = chainer.grad([squares], inputs[:2])
    return [found.array for found in (y, *gradients, *again)]


def compare(device, function, arrays):
    """Compare a GPU, in the arrays' dtypes, with float64 in host memory."""
    expected = differentiate(function, [array.astype("f8") for array in arrays])
    actual = differentiate(function, [device.send(array) for array in arrays])
    tolerance = TOLERANCES[arrays[0].dtype.name]
    for got, wanted in zip(actual, expected, strict=True):
        scale = max(1.0, float(np.abs(wanted).max()))
        got = chainer.backends.cuda.to_cpu(got).astype("f8")
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * scale)


@each_way
@pytest.mark.parametrize("name", SHAPES)
def test_convolution(name, dtype, mode, device, done):
    shape, n_out, k, arguments = SHAPES[name]
    w = (n_out, shape[1] // arguments.get("groups", 1), k, k)
    # Small values, so that no gradient of a gradient overflows float16.
    size = 2 * np.sqrt(w[1]) * k
    arrays = [(array / size).astype(dtype) for array in draw(shape, w, n_out)]
    with chainer.using_config("compute_mode", mode):
        compare(device, lambda *inputs: F.convolution_2d(*inputs, **arguments), arrays)
    assert {problem.computes for problem in done} == set("xwy")
    assert {problem.channels_last for problem in done} == {mode is not None}


@each_way
@pytest.mark.parametrize("name", SHAPES)
def test_deconvolution(name, dtype, mode, device, done):
    shape, n_out, k, arguments = SHAPES[name]
    w = (n_out, shape[1] // arguments.get("groups", 1), k, k)
    x, w = draw(shape, w)
    with chainer.no_backprop_mode():
        y = F.convolution_2d(x, w, **arguments).array
    size = 2 * np.sqrt(n_out) * k
    arrays = [(array / size).astype(dtype) for array in draw(y.shape, w.shape)]
    arguments = {**arguments, "outsize": shape[2:]}
    with chainer.using_config("compute_mode", mode):
        compare(device, lambda *inputs: F.deconvolution_2d(*inputs, **arguments), arrays)
    assert done[0].computes == "x"
    assert {problem.channels_last for problem in done} == {mode is not None}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NORMALIZED)
def test_batch_normalization(name, dtype, device, done):
    shape = NORMALIZED[name]
    x, gamma, beta = draw(shape, shape[1], shape[1])
    arrays = [x.astype(dtype), (gamma + 2).astype("f4"), beta.astype("f4")]
    expected = normalized(chainer.get_device("@numpy"), [array.astype("f8") for array in arrays])
    actual = normalized(device, arrays)
    for got, wanted in zip(actual, expected, strict=True):
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCES[dtype] * scale)
    assert done == ["normalize", "gradients"]


def normalized(place, arrays):
    """Return the values, the gradients and the running averages, in host memory."""
    place.use()
    inputs = [chainer.Variable(place.send(array)) for array in arrays]
    gamma = inputs[1].array
    averages = [place.xp.full(gamma.shape, value, gamma.dtype) for value in (0.5, 2)]
    y = F.batch_normalization(
        *inputs, running_mean=averages[0], running_var=averages[1], decay=0.75
    )
    weights = draw(y.shape)[0].astype("f2").astype(y.dtype)
    loss = F.sum(F.cast(y * place.send(weights), "float64"))
    gradients = chainer.grad([loss], inputs)
    found = (y.array, *(gradient.array for gradient in gradients), *averages)
    return [chainer.backends.cuda.to_cpu(array).astype("f8") for array in found]


def test_float32_is_not_rounded_to_tf32(device, done):
    x = device.send(np.full((2, 64, 8, 8), 1 + 2**-12, "f4"))
    w = device.send(np.ones((64, 64, 1, 1), "f4"))
    y = F.convolution_2d(x, w).array
    assert abs(float(y.max()) / 64 - 1 - 2**-12) < 1e-6
    with chainer.using_config("use_cudnn_tensor_core", "always"):
        F.convolution_2d(x, w)
    assert [problem.tensor_cores for problem in done] == [False, True]


def test_deterministic_results_are_the_same_to_the_last_bit(device, done):
    x, w, gy = (
        device.send(a.astype("f4")) for a in draw((8, 16, 28, 28), (16, 16, 3, 3), (8, 16, 26, 26))
    )
    with chainer.using_config("cudnn_deterministic", True):
        results = []
        for _ in range(5):
            inputs = [chainer.Variable(array) for array in (x, w)]
            gradients = chainer.grad([F.convolution_2d(*inputs)], inputs, [chainer.Variable(gy)])
            results.append([chainer.backends.cuda.to_cpu(found.array) for found in gradients])
    assert all(problem.deterministic for problem in done)
    for other in results[1:]:
        for first, again in zip(results[0], other, strict=True):
            assert (first == again).all()


def test_work_is_in_the_order_of_the_current_stream(device, done):
    cupy = device.xp
    x, w = (device.send(a.astype("f4")) for a in draw((8, 64, 56, 56), (64, 64, 3, 3)))
    expected = cupy.asnumpy(F.convolution_2d(3 * x, w).array)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(3):
            y = F.convolution_2d(3 * x, w).array  # each needs what the stream did just before
        actual = cupy.asnumpy(y)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_arrays_that_are_not_aligned(device, done):
    cupy = device.xp
    room = cupy.ones(2 * 8 * 6 * 6 + 1, np.float16)
    x = room[1:].reshape(2, 8, 6, 6)
    assert x.data.ptr % 16 != 0
    y = F.convolution_2d(x, cupy.ones((8, 8, 3, 3), np.float16)).array
    assert (y == 72).all()


def test_the_variable_switches_it_on(device, done, python):
    code = """
import chainer, chainer.links as L, numpy as np
from chainer_fast.cudnn.normalization import the_normalizer
from chainer_fast.cudnn.runner import the_runner
model = chainer.Sequential(L.Convolution2D(3, 8, 3), L.BatchNormalization(8))
device = chainer.get_device("@cupy:0")
device.use()
model.to_device(device)
done = []
def watch(thing, name):
    function = getattr(thing, name)
    setattr(thing, name, lambda *args, **kwargs: done.append(name) or function(*args, **kwargs))
watch(the_runner(), "run")
watch(the_normalizer(), "normalize")
watch(the_normalizer(), "gradients")
x = chainer.Variable(device.send(np.ones((2, 3, 8, 8), np.float32)))
chainer.functions.sum(model(x)).backward()
print(*done)
"""
    names = python(code, CHAINER_COMPAT_CUDNN="1").split()
    assert names[:2] == ["run", "normalize"]
    assert sorted(names[2:]) == ["gradients", "run", "run"]
