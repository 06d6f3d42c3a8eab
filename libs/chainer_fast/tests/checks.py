"""One small check for every row of the table: it passes with the repair and fails without it.

``run_checks.py`` runs them, and imports this file, and so Chainer, with or without the repair.
"""

import contextlib
import functools
import importlib
import pickle
import sys
import tracemalloc
import warnings
from types import SimpleNamespace
from unittest import mock

import chainer
import chainer.functions as F
import numpy
from chainer.backends import cuda
from chainer.functions.activation.relu import ReLU, ReLUGrad2
from chainer.functions.array.concat import Concat
from chainer.functions.connection import convolution_2d, deconvolution_2d
from chainer.functions.math.basic_math import Add
from chainer.functions.math.sum import Sum
from chainer.functions.noise import dropout
from chainer.functions.normalization import batch_normalization
from chainer.functions.pooling.average_pooling_2d import AveragePooling2D, AveragePooling2DGrad
from chainer.functions.pooling.average_pooling_nd import AveragePoolingND, AveragePoolingNDGrad
from chainer.functions.pooling.max_pooling_nd import MaxPoolingND, MaxPoolingNDGrad

from chainer_fast import updates
from chainer_fast.channels_last import layout
from chainer_fast.channels_last.current_step import taking_part
from chainer_fast.channels_last.layout import is_channels_last
from chainer_fast.cudnn import runner
from chainer_fast.graphs.drawing import Draws
from chainer_fast.repairs import recordable, reductions

CHECKS = {}


def check(name):
    """Register a function as the check for the named repair."""
    return lambda function: CHECKS.setdefault(name, function)


def _waits_for_its_use(user, part, function):
    """Check that a Chainer module has a stand-in for part of SciPy that works the same."""
    module = importlib.import_module(f"chainer.{user}")
    found = getattr(getattr(module, "scipy", module), part)
    real = importlib.import_module(f"scipy.{part}")
    assert found is not real
    assert getattr(found, function) is getattr(real, function)
    assert pickle.loads(pickle.dumps(found)) is real


USERS_OF_SCIPY = [
    ("datasets.svhn", "io", "loadmat"),
    ("distributions.multivariate_normal", "linalg", "solve_triangular"),
    ("functions.math.erfcinv", "special", "erfcinv"),
    ("functions.math.erfcx", "special", "erfcx"),
    ("functions.math.erfinv", "special", "erfinv"),
    ("functions.math.ndtri", "special", "ndtri"),
    ("functions.math.sparse_matmul", "sparse", "coo_matrix"),
]
for user, *names in USERS_OF_SCIPY:
    name = f"scipy-when-used-by-{user.rpartition('.')[2]}"
    CHECKS[name] = functools.partial(_waits_for_its_use, user, *names)


@check("onednn-default")
def _():
    assert chainer.config.use_ideep == "auto"


@check("onednn-device")
def _():
    # chainer.testing looks at supported_array_types.
    array = _left_by_onednn(numpy.ones((1, 16, 2, 2), "f")).array
    device = chainer.get_device("@numpy")
    for each in (array, numpy.ones(2)):
        assert device.is_array_supported(each)
        assert isinstance(each, device.supported_array_types)
    assert not device.is_array_supported([1.0])


@check("onednn-batch-normalization-axis")
def _():
    x = numpy.arange(24, dtype=numpy.float32).reshape(2, 3, 2, 2)
    ones = numpy.ones(2, numpy.float32)
    with chainer.using_config("use_ideep", "auto"):
        y = F.batch_normalization(x, ones, ones, axis=(0, 1, 2)).array
    expected = 1 + (x - x.mean(axis=(0, 1, 2))) / x.std(axis=(0, 1, 2))
    numpy.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def _left_by_onednn(x):
    """Return the same images, as a convolution by oneDNN leaves them."""
    chainer.config.use_ideep = "auto"
    return F.convolution_2d(x, numpy.eye(x.shape[1], dtype="f")[:, :, None, None])


@check("onednn-function-inputs")
def _():
    class Twice(chainer.FunctionNode):
        def forward(self, inputs):
            self.retain_inputs((0,))
            assert type(inputs[0]) is numpy.ndarray
            return (2 * inputs[0],)

        def backward(self, indexes, grad_outputs):
            assert type(self.get_retained_inputs()[0].array) is numpy.ndarray
            return (2 * grad_outputs[0],)

    x = chainer.Variable(numpy.ones((1, 16, 2, 2), "f"))
    (y,) = Twice().apply((_left_by_onednn(x),))
    chainer.functions.sum(y).backward()
    assert (y.array == 2).all() and (x.grad == 2).all()
    (y,) = Twice().apply((_left_by_onednn(x).array,))


@check("onednn-function-gradients")
def _():
    class Twice(chainer.Function):
        def forward(self, inputs):
            return (2 * inputs[0],)

        def backward(self, inputs, grad_outputs):
            assert type(inputs[0]) is type(grad_outputs[0]) is numpy.ndarray
            return (2 * grad_outputs[0],)

    x = chainer.Variable(numpy.ones((1, 16, 2, 2), "f"))
    chainer.functions.sum(_left_by_onednn(Twice()(x))).backward()
    assert (x.grad == 2).all()


def _peak(function):
    """Return the peak memory of a function, in bytes, and its result."""
    tracemalloc.start()
    try:
        result = function()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


@check("max-pooling-copies")
def _():
    chainer.config.use_ideep = "never"
    x = chainer.Variable(numpy.random.default_rng(0).normal(size=(4, 8, 128, 128)).astype("f"))
    peak, y = _peak(lambda: F.max_pooling_2d(x, 3, 1))
    assert peak < 6 * x.array.nbytes
    windows = numpy.lib.stride_tricks.sliding_window_view(x.array, (3, 3), (2, 3))
    assert (y.array == windows.max(axis=(4, 5))).all()
    y.grad = numpy.ones_like(y.array)
    peak, _ = _peak(y.backward)
    assert peak < 6 * x.array.nbytes
    assert x.grad.sum() == y.size


@check("leaky-relu-copies")
def _():
    chainer.config.use_ideep = "never"
    x = chainer.Variable(numpy.linspace(-2, 2, 10**6, dtype="f"))
    peak, y = _peak(lambda: F.leaky_relu(x, 0.25))
    assert peak < 1.3 * x.array.nbytes
    expected = numpy.where(x.array > 0, x.array, x.array / 4)
    assert (y.array == expected).all()
    y.grad = y.array.copy()
    y.backward()
    assert (x.grad == numpy.where(x.array > 0, y.array, y.array / 4)).all()


@check("batch-normalization-copies")
def _():
    chainer.config.use_ideep = "never"
    x = numpy.random.default_rng(0).normal(3, 2, size=(4, 8, 128, 128)).astype("f")
    gamma = numpy.ones(8, "f")
    peak, y = _peak(lambda: F.batch_normalization(x, gamma, gamma))
    assert peak < 1.5 * x.nbytes
    exact = x.astype("d")
    mean, std = (find(exact, axis=(0, 2, 3), keepdims=True) for find in (numpy.mean, numpy.std))
    numpy.testing.assert_allclose(y.array, (exact - mean) / std + 1, rtol=0, atol=1e-4)


@check("loss-scaling-waits")
def _():
    class Flag:
        looks, is_true, data = 0, False, SimpleNamespace(ptr=1)

        def __bool__(self):
            self.looks += 1
            return self.is_true

    class Calls(list):
        def add(self, kernel, gradient, address):
            self.append(numpy.isfinite(gradient).all())

        def run(self):
            flag.is_true = not all(self)

    class Device(type(chainer.get_device("@numpy"))):
        xp = SimpleNamespace(
            zeros=lambda shape, dtype: flag, isfinite=numpy.isfinite, all=numpy.all
        )

    flag, device = Flag(), Device()
    parameters = {name: SimpleNamespace(device=device, grad=numpy.ones(2, "f")) for name in "abc"}
    target = SimpleNamespace(params=parameters.values, namedparams=parameters.items)
    optimizer = chainer.optimizers.SGD()
    optimizer.target = target
    optimizer.loss_scaling()
    with (
        mock.patch.object(updates, "Calls", lambda *_: Calls()),
        mock.patch.object(cuda, "cupy", Device.xp),
        mock.patch.object(cuda, "elementwise", lambda *texts: None),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        optimizer.check_nan_in_grads()
        assert (flag.looks, optimizer.is_safe_to_update()) == (1, True)
        parameters["b"].grad[1] = numpy.inf
        optimizer.check_nan_in_grads()
    (warning,) = caught
    assert "param.grad of b" in str(warning.message)
    assert not optimizer.is_safe_to_update()


@contextlib.contextmanager
def _launched():
    """Record kernels instead of compiling them; yield their names and sizes, and two arrays."""
    import cupy

    launched = []

    def elementwise(in_params, out_params, operation, name, **options):
        return lambda *arrays, size: launched.append((name, size))

    def array(shape, dtype):
        found = cupy.ndarray()
        found.shape, found.ndim, found.dtype = shape, len(shape), numpy.dtype(dtype)
        found.nbytes = found.dtype.itemsize * int(numpy.prod(shape))
        found.flags, found.data = SimpleNamespace(c_contiguous=True), SimpleNamespace(ptr=512)
        return found

    with (
        mock.patch.object(cuda, "elementwise", elementwise),
        mock.patch.object(cupy, "empty", array, create=True),
    ):
        yield launched, [array((2, 2**19), "e") for _ in range(2)]


@check("cuda-graphs")
def _():
    model = chainer.links.Linear(3, 2)
    optimizer = chainer.optimizers.SGD().setup(model)
    assert optimizer.cuda_graphs is None
    optimizer.use_cuda_graphs()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer.update(lambda x: F.sum(model(x)), numpy.ones((4, 3), "f"))
    assert "no CUDA graphs: the model is not on a GPU" in str(warned[0].message)
    assert optimizer.t == 1


@check("relu-bandwidth")
def _():
    with _launched() as (launched, (x, gy)):
        ReLU().forward_gpu((x,))
        ReLUGrad2(x).forward_gpu((gy,))
    sizes = {"chainer_fast_relu": 2**17, "chainer_fast_relu_gradient": 2**17}
    assert dict(launched) == sizes


@check("addition-bandwidth")
def _():
    with _launched() as (launched, arrays):
        Add().forward(arrays)
    assert launched == [("chainer_fast_add", 2**17)]


@check("optimizer-launches")
def _():
    launched = []

    class Array(cuda.ndarray):
        size, dtype, device = 3, numpy.dtype("f"), SimpleNamespace(id=0)
        flags = SimpleNamespace(c_contiguous=True)

        def __init__(self):
            self.data = SimpleNamespace(ptr=id(self))

        def ravel(self):
            return self

    class Kernel:
        def __init__(self, in_params, out_params, operation, name, **options):
            found = [
                SimpleNamespace(name=text.split()[-1], ctype="T", dtype=None, raw=False)
                for text in f"{in_params},{out_params}".split(",")
                if text
            ]
            for param in found:
                param.is_const = param.name != "param"
            self.params, self.in_params, self.out_params = found, found[:-1], found[-1:]
            self.operation, self.name, self.preamble, self.kwargs = operation, name, "", options

        def __call__(self, *args, size=None):
            for arg in args:
                if hasattr(arg, "__cupy_override_elementwise_kernel__"):
                    return arg.__cupy_override_elementwise_kernel__(self, *args)
            return launched.append((self.name, size))

    class Parameter(SimpleNamespace):
        update = chainer.Parameter.update

    cupy = SimpleNamespace(ndarray=cuda.ndarray, asarray=lambda array: array)
    optimizer = chainer.optimizers.SGD()
    parameters = []
    for _ in range(3):
        rule, array = optimizer.create_update_rule(), Array()
        rule._state = {}
        parameter = Parameter(array=array, data=array, grad=Array(), update_rule=rule)
        parameter.update = functools.partial(rule.update_core_gpu, parameter)
        vars(parameter).update(layout=None, _loss_scale=None, device=chainer.get_device("@numpy"))
        parameters.append(parameter)
    named = [(str(k), parameter) for k, parameter in enumerate(parameters)]
    optimizer.target = SimpleNamespace(
        params=lambda include_uninit=True: parameters,
        namedparams=lambda include_uninit=True: named,
    )
    optimizer._hookable = chainer.optimizer._OptimizerHookable(optimizer)
    with mock.patch.multiple(cuda, elementwise=Kernel, cupy=cupy):
        optimizer.update()
    assert launched == [("sgd_for_all", 3 * 256)]


@check("products-in-graphs")
def _():
    import cupy

    class Array(cupy.ndarray):
        ndim, dtype = 2, numpy.dtype("f")

    class Products:
        matmul = dot = tensordot = staticmethod(lambda *arrays, **options: "ours")

    a = Array()
    products = (
        lambda: a.dot(a),
        lambda: a @ a,
        lambda: cupy.matmul(a, a),
        lambda: cupy.tensordot(a, a, axes=1),
    )
    with mock.patch.object(recordable, "the_products", Products):
        assert [product() for product in products] == [None] * 4
        with Draws(None).step():
            assert [product() for product in products] == ["ours"] * 4
            for dtype, ndim in (("i", 2), ("F", 2), ("f", 0)):
                a.dtype, a.ndim = numpy.dtype(dtype), ndim
                assert [product() for product in products] == [None] * 4


@check("dropout-in-graphs")
def _():
    launched = []

    def elementwise(*texts, **options):
        return lambda *arrays, size: launched.append((texts[-1], size))

    with (
        mock.patch.object(cuda, "elementwise", elementwise),
        mock.patch.object(cuda.cupy, "empty", numpy.empty, create=True),
        Draws(None).step(),
    ):
        dropout.Dropout(0.5).forward_gpu((numpy.ones(9, "f"),))
    assert launched == [("chainer_fast_dropout", 3)]


@check("channels-last-functions")
def _():
    from stand_in_layout import Array, channels_last, in_c_order

    def elementwise(*texts, **options):
        return lambda first, *others: in_c_order(numpy.zeros(first.shape))

    x = channels_last(numpy.ones((2, 3, 4, 5), "e"))
    statistics = [in_c_order(numpy.ones((1, 3, 1, 1)))] * 4
    with (
        mock.patch.multiple(cuda, ndarray=Array, elementwise=elementwise),
        mock.patch.object(cuda.cupy, "maximum", numpy.maximum, create=True),
    ):
        results = [
            ReLU().forward_gpu((x,))[0],
            Add().forward((x, x))[0],
            dropout.Dropout(0.5, mask=x).forward_gpu((x,))[0],
            Concat(0).forward((x[:1], x[1:]))[0],
            batch_normalization._apply_bn_fwd(cuda.cupy, x, *statistics),
        ]
    for result in results:
        assert result.shape == x.shape
        assert is_channels_last(result)


@check("cudnn-convolution")
def _():
    node = convolution_2d.Convolution2DFunction(stride=2)
    y = _on_gpu_by("conv_fprop", node, (1, 2, 5, 5), (3, 2, 3, 3))
    assert y.shape == (1, 3, 2, 2)
    gradient = convolution_2d.Convolution2DGradW(node, (3, 2, 3, 3), y.dtype, None)
    w = _on_gpu_by("conv_wgrad", gradient, (1, 2, 5, 5), (1, 3, 2, 2))
    assert w.shape == (3, 2, 3, 3)


@check("cudnn-deconvolution")
def _():
    node = deconvolution_2d.Deconvolution2DFunction()
    x = _on_gpu_by("conv_dgrad", node, (1, 3, 3, 3), (3, 2, 3, 3))
    assert x.shape == (1, 2, 5, 5)


@check("compute-mode-links")
def _():
    with chainer.using_config("compute_mode", "cudnn_fast"):
        link = chainer.links.Convolution2D(1, 1, 1)
    assert link.W.layout is None
    link(numpy.ones((1, 1, 2, 2), "f"))


@check("compute-mode-default")
def _():
    assert chainer.global_config.compute_mode == "cudnn_fast"


def _lays_out_filters(function):
    """Check that a function gives filters other strides before it looks at the images."""
    filters = chainer.Parameter(numpy.ones((2, 2, 3, 3), "e"))
    assert filters.device == chainer.get_device("@numpy")  # which it remembers
    with (
        chainer.using_config("compute_mode", "cudnn_fast"),
        mock.patch.multiple(cuda, ndarray=numpy.ndarray, cupy=numpy),
        contextlib.suppress(TypeError, AttributeError),
    ):
        function("no images", filters)
    assert not filters.array.flags.c_contiguous


@check("channels-last-convolution-filters")
def _():
    _lays_out_filters(F.convolution_2d)


@check("channels-last-deconvolution-filters")
def _():
    _lays_out_filters(F.deconvolution_2d)


@check("channels-last-set")
def _():
    import cupy

    viewed = []

    class Array(cupy.ndarray):
        ndim, shape, flags = 4, (1, 2, 3, 3), SimpleNamespace(c_contiguous=False)

        def transpose(self, *axes):
            viewed.append(axes)
            return SimpleNamespace(flags=SimpleNamespace(c_contiguous=True))

    Array().set(numpy.ones((1, 2, 3, 3)))
    assert set(viewed) == {(0, 2, 3, 1)}


@check("cudnn-batch-normalization")
def _():
    # The fake CuPy takes every array for NumPy's.
    batch_normalization.cuda = SimpleNamespace(cupy=numpy)
    node = batch_normalization.BatchNormalization()
    node.forward_gpu = node.forward
    y = _on_gpu_by("batchnorm", node, (2, 8, 3, 3), (8,), (8,))
    assert y.shape == (2, 8, 3, 3)


@check("channels-last-fusing")
def _():
    normalization = SimpleNamespace(is_shared=False, pass_through=lambda gy, y: gy + y)
    seen = []
    step = SimpleNamespace(
        add=lambda inputs, compute: "a sum",
        rectify=lambda x: (x + 1, normalization),
        read=seen.append,
    )
    node, ones = ReLU(), numpy.ones(3, "f")
    with taking_part(step):
        (y,) = node.forward_gpu((ones,))
        assert Add().forward((ones, ones)) == ("a sum",)
        assert chainer.Variable(ones).array is ones
    assert [each is ones for each in seen] == [True]
    assert (y == 2).all()
    node.get_retained_outputs = lambda: (chainer.Variable(y),)
    with chainer.no_backprop_mode():
        (gradient,) = node.backward((0,), (chainer.Variable(ones),))
    assert (gradient.array == 3).all()


@check("channels-last-reductions")
def _():
    called = []

    class Kernels:
        def __getattr__(self, name):
            return lambda x, *args: called.append(name) or (x, x)[: 1 + (name == "max_pool")]

    x = layout.empty(numpy, (2, 8, 4, 4), numpy.dtype("e"))
    with (
        mock.patch.object(reductions, "the_kernels", Kernels),
        mock.patch.object(cuda, "ndarray", numpy.ndarray),
    ):
        for node, gradient in (
            (MaxPoolingND(2, 2), MaxPoolingNDGrad),
            (AveragePooling2D(2), AveragePooling2DGrad),
            (AveragePoolingND(2, 2), AveragePoolingNDGrad),
        ):
            node.forward_gpu((x,))
            gradient(node).forward_gpu((x,))
        Sum((0, 2, 3)).forward((x,))
    means = ["average_pool", "average_pool_gradient"]
    assert called == ["max_pool", "max_pool_gradient", *means, *means, "sum_by_channel"]


def _on_gpu_by(name, node, *shapes):
    """Compute on a stand-in for a GPU; check that the fake cuDNN does it; return the result."""
    import cudnn
    import functions
    from host_gpu import HostGpu

    runner.Gpu = HostGpu
    # Loading libcudnn.so.9 gives a stand-in, too.
    sys.modules["ctypes"].CDLL = lambda name: functions.Functions(cudnn)
    chainer.config.use_ideep = "never"  # oneDNN would take arrays in host memory
    node._input_layouts = (None,) * len(shapes)
    (result,) = node.forward_gpu(tuple(numpy.ones(shape, "f4") for shape in shapes))
    assert cudnn.log[-1][0] == name
    return result
