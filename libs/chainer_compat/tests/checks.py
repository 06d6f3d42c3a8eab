"""One small check for every repair: it passes with the repair and fails without it.

``run_checks.py`` runs them, and imports this file, and so Chainer, with or without the repair.
"""

import _thread
import functools
import hashlib
import os
import tempfile
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import chainer
import chainer.functions as F
import chainer.links as L
import h5py
import numpy
import pytest
from chainer import dataset, testing
from chainer.backends import cuda
from chainer.dataset import concat_examples
from chainer.distributions import Categorical
from chainer.functions.math.clip import Clip
from chainer.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
from chainer.links.model.vision import vgg
from chainer.reporter import DictSummary, Summary
from chainer.serializers import HDF5Deserializer, HDF5Serializer, NpzDeserializer, load_npz
from chainer.testing import doctest_helper
from chainer.training.extensions import MicroAverage, PrintReport, ProgressBar
from chainer.training.extensions.snapshot_writers import ThreadWriter
from chainer.utils import to_coo
from safetensors.numpy import save_file

from chainer_compat.repairs import mnist

CHECKS = {}


def check(name):
    """Register a function as the check for the named repair."""
    return lambda function: CHECKS.setdefault(name, function)


@check("environment-check")
def _():
    assert chainer.__version__ == "7.8.1"  # an import checks the environment


@check("testing-requirements")
def _():
    class Case:
        def test(self):
            pass

    assert not getattr(testing.with_requires("numpy>=1.0")(Case), "__unittest_skip__", False)
    assert testing.with_requires("numpy>=99")(Case).__unittest_skip__
    assert testing.without_requires("numpy>=1.0")(Case).__unittest_skip__


@check("doctest-requirements")
def _():
    assert doctest_helper.skipif_requires_satisfied("numpy>=1.0")
    assert not doctest_helper.skipif_requires_satisfied("numpy>=99")


@check("as-strided-sctypes")
def _():
    x = chainer.Variable(numpy.arange(4, dtype=numpy.float32))
    y = F.as_strided(x, (3, 2), (1, 1), 0)
    F.sum(y).backward()
    assert y.array.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert x.grad.tolist() == [1, 2, 2, 1]
    assert not hasattr(numpy, "sctypes") or numpy.__version__ < "2"


@check("resize-images-float")
def _():
    x = chainer.Variable(numpy.array([[[[0, 1], [2, 3]]]], numpy.float32))
    y = F.resize_images(x, (3, 3))
    F.sum(y).backward()
    assert y.array[0, 0].tolist() == [[0, 0.5, 1], [1, 1.5, 2], [2, 2.5, 3]]
    assert x.grad.sum() == 9
    assert F.resize_images(x, (4, 4), mode="nearest").array[0, 0, 0].tolist() == [0, 0, 1, 1]
    assert F.resize_images(x, (3, 3), align_corners=False).shape == (1, 1, 3, 3)


@check("categorical-meshgrid")
def _():
    p = numpy.array([[[0.2, 0.8], [0.5, 0.5], [0.1, 0.9]]] * 2, numpy.float32)
    labels = numpy.array([[0, 1, 1], [1, 0, 0]], numpy.int32)
    expected = numpy.log(numpy.take_along_axis(p, labels[..., None], 2)[..., 0])
    for x in (labels, chainer.Variable(labels)):
        got = Categorical(p=p).log_prob(x)
        numpy.testing.assert_allclose(got.array, expected, rtol=1e-6)
    single = Categorical(p=p[0, 0]).log_prob(numpy.array(1))
    numpy.testing.assert_allclose(single.array, numpy.log(0.8), rtol=1e-6)


@check("pad-sequence-unsigned")
def _():
    xs = [numpy.array([1, 2], numpy.uint8), numpy.array([3], numpy.uint8)]
    assert F.pad_sequence(xs, padding=-1).array.tolist() == [[1, 2], [3, 255]]
    xs = [x.astype(numpy.float32) for x in xs]
    assert F.pad_sequence(xs, padding=0.5).array.tolist() == [[1, 2], [3, 0.5]]


@check("debug-print-device")
def _():
    text = chainer.Variable(numpy.zeros(2, numpy.float32), name="x").debug_print()
    assert text.splitlines()[1] == "- device: CPU"
    assert "- device: None" in chainer.Variable().debug_print()


@check("summary-float64")
def _():
    for value in (numpy.float16(2), numpy.array(2, numpy.float16), numpy.float32(2)):
        summary = Summary()
        for _ in range(40000):
            summary.add(value)
        mean, std = summary.make_statistics()
        assert (mean, std, mean.dtype) == (2, 0, numpy.float64)
    numbers = DictSummary()
    for _ in range(3):
        numbers.add({"x": numpy.int8(100), "y": (numpy.float16(60000), numpy.float16(2)), "z": 1})
    assert numbers.make_statistics() == {
        "x": 100, "x.std": 0, "y": 60000 - 60000 % 32, "y.std": 0, "z": 1, "z.std": 0,
    }  # fmt: skip


@check("micro-average-float64")
def _():
    end_of_epoch = SimpleNamespace(reached=False)
    average = MicroAverage("n", "d", "mean", trigger=lambda trainer: end_of_epoch.reached)
    reporter = chainer.Reporter()
    trainer = SimpleNamespace(observation={"n": numpy.float16(2), "d": 1})
    for _ in range(3000):
        average(trainer)
    end_of_epoch.reached = True
    with reporter:
        average(trainer)
    assert reporter.observation == {"mean": 2}


@check("gradient-clipping-float64")
def _():
    model = chainer.Chain()
    with model.init_scope():
        model.a = chainer.Parameter(numpy.ones((20, 20), numpy.float16))
        model.b = chainer.Parameter(numpy.ones((20, 20), numpy.float16))
    optimizer = chainer.optimizers.SGD(lr=1).setup(model)
    for parameter in model.params():
        parameter.grad = numpy.full(parameter.shape, 10, numpy.float16)
    chainer.optimizer_hooks.GradientClipping(100)(optimizer)
    # Each squared norm is 40,000; their sum exceeds 65,504, the largest float16.
    norm = numpy.sqrt(sum((p.grad.astype("d") ** 2).sum() for p in model.params()))
    assert abs(norm - 100) < 0.5


@check("clip-scalars")
def _():
    x = numpy.array([-2, 0.25, 2], numpy.float16)
    y = F.clip(x, numpy.float32(-1), numpy.int64(1))
    assert y.dtype == numpy.float16
    # CuPy promotes as NumPy does, and its branch does not cast the result back.
    with mock.patch.object(cuda, "cupy", numpy):
        (found,) = Clip(numpy.float32(-1), numpy.int64(1)).forward_gpu((x,))
    assert found.dtype == numpy.float16
    assert found.tolist() == y.array.tolist() == [-1, 0.25, 1]


@check("batch-normalization-scalars")
def _():
    ones = numpy.ones(3, numpy.float32)
    for eps in (numpy.float64(3), numpy.int64(3)):
        inputs = [numpy.ones((2, 3), numpy.float32), ones, ones, ones * 0, ones]
        x, gamma, beta, mean, var = map(chainer.Variable, inputs)
        y = F.fixed_batch_normalization(x, gamma, beta, mean, var, eps)
        assert y.array.tolist() == [[1.5] * 3] * 2
        F.sum(y).backward()
        for variable, slope in ((x, 0.5), (gamma, 1), (beta, 2), (mean, -1), (var, -0.125)):
            assert variable.grad.dtype == numpy.float32
            assert (variable.grad == slope).all()


@check("layer-normalization-scalars")
def _():
    x = numpy.random.RandomState(0).rand(3, 4).astype(numpy.float32)
    ones = numpy.ones(4, numpy.float32)
    y = F.layer_normalization(x, ones, ones, numpy.float64(1e-5))
    assert y.dtype == numpy.float32
    assert (y.array == F.layer_normalization(x, ones, ones, 1e-5).array).all()


@check("local-response-normalization-scalars")
def _():
    x = numpy.random.RandomState(0).rand(2, 7, 3).astype(numpy.float32)
    y = F.local_response_normalization(x, 5, *map(numpy.float64, (2, 1e-4, 0.75)))
    assert y.dtype == numpy.float32
    assert (y.array == F.local_response_normalization(x).array).all()


@check("batch-renormalization-scalars")
def _():
    x = numpy.random.RandomState(0).rand(5, 4).astype(numpy.float32)
    ones = numpy.ones(4, numpy.float32)
    gradients = []
    for number in (float, numpy.float64):
        gamma = chainer.Variable(ones)
        with chainer.using_config("train", True):
            y = F.batch_renormalization(
                x,
                gamma,
                ones,
                number(2),
                number(1),
                eps=number(1e-3),
                running_mean=ones * 0,
                running_var=ones.copy(),
            )
        F.sum(y * x).backward()
        gradients.append(gamma.grad)
    assert gradients[1].dtype == numpy.float32
    assert (gradients[0] == gradients[1]).all()


@check("hyperparameter-scalars")
def _():
    for name in ("SGD", "SMORMS3"):
        optimizer = getattr(chainer.optimizers, name)(lr=numpy.float64(0.5))
        optimizer.setup(L.Linear(2, 2))
        assert type(optimizer.lr) is float
        parameter = optimizer.target.W
        parameter.grad = numpy.ones_like(parameter.array)
        optimizer.lr = numpy.cos(0.0)
        optimizer.update()
        states = parameter.update_rule.state or {}
        assert all(value.dtype == numpy.float32 for value in states.values())


@check("convert-maximum-out")
def _():
    batch = [numpy.ones(2, numpy.float32), numpy.ones(3, numpy.float32)]
    assert concat_examples(batch, padding=0).tolist() == [[1, 1, 0], [1, 1, 1]]


@check("fix-trunc")
def _():
    x = numpy.array([-1.5, -0.5, 0.5, 1.5], numpy.float32)
    y = F.fix(x)
    assert y.array.tolist() == [-1, 0, 0, 1]
    assert y.dtype == numpy.float32


@check("maxout-shape")
def _():
    shapes = []

    def fill(array):
        shapes.append(array.shape)
        array[...] = numpy.arange(array.size).reshape(array.shape)

    link = L.Maxout(2, 3, 4, initialW=fill, initial_bias=fill)
    assert shapes == [(3, 4, 2), (3, 4)]
    assert link.linear.W.array[-1].tolist() == [22, 23]
    assert link.linear.b.array[-1] == 11
    assert L.Maxout(2, 3, 4)(numpy.ones((5, 2), numpy.float32)).shape == (5, 3)


@check("multiprocess-iterator-daemon")
def _():
    iterator = MultiprocessIterator(list(range(6)), 3, shuffle=False, n_processes=1)
    try:
        assert [next(iterator), next(iterator)] == [[0, 1, 2], [3, 4, 5]]
        others = set(threading.enumerate()) - {threading.main_thread()}
        assert others
        assert all(thread.daemon for thread in others)
    finally:
        iterator.finalize()


@check("multiprocess-iterator-failures")
def _():
    # The third example is missing. Without the repair, that ends the thread that next() waits for.
    examples = dict.fromkeys((0, 1, 3), 0)
    iterator = MultiprocessIterator(examples, 3, shuffle=False, n_processes=1, shared_mem=0)
    threading.excepthook = lambda _: _thread.interrupt_main()
    try:
        with pytest.raises(KeyError) as caught:
            next(iterator)
        assert caught.value.args == (2,)
    finally:
        iterator.finalize()
    with pytest.raises(KeyError) as caught:  # while the first batch is measured
        next(MultiprocessIterator(examples, 3, shuffle=False))
    assert caught.value.args == (2,)


@check("multiprocess-iterator-orders")
def _():
    iterator = MultiprocessIterator([0, 1, 2], 2, n_processes=1, shared_mem=0)
    before = numpy.random.get_state()[1:3]
    try:
        for _ in range(4):
            next(iterator)
        numpy.testing.assert_equal(numpy.random.get_state()[1:3], before)
    finally:
        iterator.finalize()


@check("multithread-iterator-snapshot")
def _():
    iterator = MultithreadIterator([0, 1, 2, 3], 2)
    next(iterator)
    before = numpy.random.get_state()[1:3]
    chainer.serializers.npz.serialize(iterator)
    next(iterator)
    iterator.finalize()
    numpy.testing.assert_equal(numpy.random.get_state()[1:3], before)


@check("serial-iterator-empty")
def _():
    with pytest.raises(ValueError, match="this SerialIterator has no example"):
        next(SerialIterator([], 1))


@check("multithread-iterator-empty")
def _():
    with pytest.raises(ValueError, match="this MultithreadIterator has no example"):
        _ = MultithreadIterator([], 1).epoch_detail


@check("multiprocess-iterator-empty")
def _():
    with pytest.raises(ValueError, match="this MultiprocessIterator has no example"):
        _ = MultiprocessIterator([], 1).epoch_detail


@check("print-report-without-output")
@check("progress-bar-without-output")
def _():
    for extension in (PrintReport([]), ProgressBar()):
        assert hasattr(vars(extension)["_out"], "write")


@check("hdf5-strings")
def _():
    with tempfile.TemporaryDirectory() as folder, h5py.File(Path(folder, "f"), "w") as file:
        file.create_dataset("text", data="grüße")
        load = HDF5Deserializer(file)
        assert load("text", "") == "grüße"
        assert HDF5Deserializer(file, strict=False)("absent", "as before") == "as before"
        HDF5Serializer(file)("none", None)
        assert load("none", "") is None


@check("hdf5-own-content")
def _():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "secret").write_bytes(b"secret")
        with h5py.File(Path(folder, "f"), "w") as file:
            secret = [(str(Path(folder, "secret")), 0, 6)]
            file.create_dataset("x", (6,), "u1", external=secret)
            with pytest.raises(OSError) as caught:
                HDF5Deserializer(file)("x", None)
            assert str(caught.value).startswith(f"'x' in {Path(folder, 'f')} has its data in")


@check("npz-no-code")
def _():
    array = numpy.array([Path("a path is neither None nor a number nor a string")])
    with tempfile.TemporaryDirectory() as folder:
        numpy.savez(Path(folder, "f.npz"), x=array)
        with numpy.load(Path(folder, "f.npz"), allow_pickle=True) as file:
            for load in (
                lambda: NpzDeserializer(file)("x", None),
                lambda: load_npz(Path(folder, "f.npz"), _LoadsX()),
            ):
                with pytest.raises(OSError) as caught:
                    load()
                assert str(caught.value).startswith(f"'x' in {Path(folder, 'f.npz')} is a pickle")


class _LoadsX:
    def serialize(self, serializer):
        return serializer("x", None)


@check("snapshot-writers")
def _():
    x, written, is_changed = numpy.zeros(1), [], threading.Event()

    def save(path, target):
        is_changed.wait()
        written.append(target["x"].item())
        Path(path).touch()

    with tempfile.TemporaryDirectory() as folder:
        writer = ThreadWriter(savefun=save)
        writer("f", folder, {"x": x})
        x += 1
        is_changed.set()
        writer.finalize()
    assert written == [0]


@check("caffe-protobuf")
def _():
    from chainer.links.caffe.protobuf3 import caffe_pb2

    net = caffe_pb2.NetParameter(name="net")
    layer = net.layer.add(name="fc", type="InnerProduct", phase=caffe_pb2.TEST)
    layer.inner_product_param.num_output = 10
    again = caffe_pb2.NetParameter.FromString(net.SerializeToString())
    assert again.layer[0].inner_product_param.num_output == 10
    assert caffe_pb2.V1LayerParameter.CONVOLUTION == 4
    assert type(net).__module__ == caffe_pb2.__name__


def _exports(function):
    """Check that a function exported to ONNX computes the same."""
    import onnx_chainer
    from onnx.reference import ReferenceEvaluator

    x = numpy.array([[-1, 2, 3], [5, -4, 6]], numpy.float32)
    graph = onnx_chainer.export(chainer.Sequential(function), x, input_names="x")
    (found,) = ReferenceEvaluator(graph).run(None, {"x": x})
    expected = function(x).array
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


for name, function in {
    "onnx-export": F.relu,
    "onnx-constants": lambda x: F.reshape(x, (3, 2)),
    "onnx-array-functions": lambda x: F.cast(x, "float16"),
    "onnx-math-functions": lambda x: F.argmax(x, axis=1),
}.items():
    CHECKS[name] = functools.partial(_exports, function)


@check("sparse-matmul-float16")
def _():
    a = numpy.array([[0, 2], [3, 0]], numpy.float16)
    b = numpy.array([[1, 2], [3, 4]], numpy.float16)
    y = F.sparse_matmul(to_coo(a, requires_grad=True), b)
    assert y.dtype == numpy.float16
    assert y.array.tolist() == (a @ b).tolist()
    batch = F.sparse_matmul(to_coo(numpy.stack([a, a])), numpy.stack([b, b]))
    assert batch.array.tolist() == [(a @ b).tolist()] * 2


@check("mnist-mirrors")
def _():
    def no_network(url, path):
        raise OSError(f"asked for {url}")

    urllib.request.urlretrieve = no_network
    name = "t10k-labels-idx1-ubyte.gz"
    mnist.SHA256[name] = hashlib.sha256(b"labels").hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_bytes(b"labels")
        os.environ["CHAINER_COMPAT_MNIST"] = folder
        dataset.set_dataset_root(Path(folder, "root"))
        path = dataset.cached_download(f"http://yann.lecun.com/exdb/mnist/{name}")
        assert Path(path).read_bytes() == b"labels"


@check("resnet-torchvision")
def _():
    _understands_pytorch("torchvision's network of ResNet50Layers", L.ResNet50Layers)


@check("vgg-torchvision")
def _():
    with mock.patch.object(vgg, "Linear", lambda *sizes, **_: L.Linear(1, 1)):  # half a GB
        _understands_pytorch("torchvision's network of VGG16Layers", L.VGG16Layers)


@check("googlenet-torchvision")
def _():
    _understands_pytorch("torchvision's GoogLeNet is another network", L.GoogLeNet)


def _understands_pytorch(message, link):
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "weights.safetensors"))
        save_file({"conv1.weight": numpy.zeros(1)}, file)
        with pytest.raises(ValueError, match=message):
            link(file)


@check("cudnn-warning")
def _():
    cuda.check_cuda_available()


@check("parallel-updater-float16")
def _():
    from chainer.training.updaters import multiprocess_parallel_updater as updater

    for kernel in (updater._memcpy_gather(), updater._memcpy_scatter()):
        assert "#include <cupy/float16.cuh>" in kernel.options["preamble"]
        assert "float16" in kernel.operation
        assert "id_pre = 0" in kernel.options["loop_prep"]


@check("negative-sampling-atomic-add")
def _():
    from chainer.functions.loss.negative_sampling import NegativeSamplingFunctionGrad

    _every_addition_is_cast(NegativeSamplingFunctionGrad.forward_gpu, 1)


@check("hierarchical-softmax-atomic-add")
def _():
    from chainer.links.loss.hierarchical_softmax import BinaryHierarchicalSoftmaxFunction

    _every_addition_is_cast(BinaryHierarchicalSoftmaxFunction.backward_gpu, 2)


def _every_addition_is_cast(function, count):
    text = "".join(c for c in function.__code__.co_consts if isinstance(c, str))
    additions = [line for line in text.splitlines() if "atomicAdd(" in line]
    assert len(additions) == count
    assert all(", static_cast<T>(" in line and line.endswith("));") for line in additions)
