"""Shared fixtures: kernels on the CPU, and a cuDNN that computes there."""

import ctypes
import functools
import inspect
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return a function that compiles C++ with float16, and loads it as a library."""
    for compiler in filter(shutil.which, ("g++", "clang++")):
        check = [compiler, "-x", "c++", "-fsyntax-only", "-"]
        if subprocess.run(check, input=b"_Float16 x;", stderr=subprocess.DEVNULL).returncode == 0:
            break
    else:
        pytest.skip("no C++ compiler that knows _Float16, as GCC does from 12 on")
    options = ["-x", "c++", "-std=gnu++14", "-shared", "-fPIC", "-O1", "-ffp-contract=off", "-w"]

    @functools.cache
    def compile_(source):
        library = tmp_path_factory.mktemp("compiled") / "kernel.so"
        command = [compiler, *options, "-o", library, "-"]
        subprocess.run(command, input=source, text=True, check=True)
        return ctypes.CDLL(str(library))

    return compile_


@pytest.fixture(scope="session")
def fake_cudnn():
    """Return a directory for PYTHONPATH whose ``cudnn`` computes with NumPy, in host memory."""
    return str(Path(__file__).parent / "fake_cudnn")


@pytest.fixture
def to_cudnn(monkeypatch):
    """Return a function that sends Chainer's functions to cuDNN, by these arguments of routes."""
    from chainer.functions.connection import convolution_2d, deconvolution_2d
    from chainer.functions.normalization import batch_normalization

    from chainer_fast.repairs import cudnn as routes

    def send(method, runner=(), normalizers=()):
        for function, route in (
            (convolution_2d.Convolution2DFunction, routes.convolve),
            (convolution_2d.Convolution2DGradW, routes.correlate),
            (deconvolution_2d.Deconvolution2DFunction, routes.deconvolve),
        ):
            monkeypatch.setattr(function, method, route(getattr(function, method), *runner))
        select = routes.select_normalization(batch_normalization, *normalizers)
        init = batch_normalization.BatchNormalization.__init__
        monkeypatch.setattr(init, "__defaults__", (*init.__defaults__[:-1], select))

    return send


@pytest.fixture
def by_cudnn(to_cudnn, monkeypatch):
    """Send Chainer's functions to cuDNN, as ``CHAINER_COMPAT_CUDNN=1`` does."""
    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
    monkeypatch.setenv("CHAINER_COMPAT_CUDNN", "1")
    to_cudnn("forward_gpu")


@pytest.fixture
def fuse(to_cudnn, stand_in, monkeypatch):
    """Return a function that lets a stand-in for cuDNN normalize with what follows."""
    import chainer
    from chainer.functions.activation.relu import ReLU
    from chainer.functions.math.basic_math import Add

    from chainer_fast.cudnn.fused_normalization import FusedNormalizer
    from chainer_fast.cudnn.normalization import Normalizer
    from chainer_fast.cudnn.runner import Runner
    from chainer_fast.repairs import fusing

    def by(cudnn, library, gpu, method):
        runner = Runner(cudnn, gpu)
        normalizer = Normalizer(runner, library)
        fused = FusedNormalizer(normalizer)
        to_cudnn(method, [lambda: runner], [lambda: normalizer, lambda: fused])
        monkeypatch.setattr(chainer.Variable, "array", chainer.Variable.array)
        for owner, name in ((ReLU, "forward_gpu"), (ReLU, "backward"), (Add, "forward")):
            monkeypatch.setattr(owner, name, getattr(owner, name.replace("gpu", "cpu")))
        fusing.fuse_with_normalization(chainer)
        monkeypatch.setattr(ReLU, method, ReLU.forward_gpu)

    return by


@pytest.fixture
def keep_channels_last(monkeypatch):
    """Let pooling and sums keep images channels last, as ``CHAINER_COMPAT_CUDNN=1`` does."""
    from chainer import functions
    from chainer.functions.math import sum as math_sum
    from chainer.functions.pooling import average_pooling_2d, average_pooling_nd, max_pooling_nd

    from chainer_fast.repairs import reductions

    for module, name in (
        (max_pooling_nd, "MaxPoolingND"),
        (average_pooling_2d, "AveragePooling2D"),
        (average_pooling_nd, "AveragePoolingND"),
    ):
        for each in (name, f"{name}Grad"):
            own = inspect.unwrap(getattr(module, each).forward_gpu)
            monkeypatch.setattr(getattr(module, each), "forward_gpu", own)
        for attribute in ("places", "indexes", "is_channels_last"):
            monkeypatch.setattr(getattr(module, name), attribute, None, raising=False)
    monkeypatch.setattr(math_sum.Sum, "forward", inspect.unwrap(math_sum.Sum.forward))
    reductions.reduce_by_kernels(functions)


@pytest.fixture
def stand_in(fake_cudnn):
    """Load a module from that directory afresh, under a name that nothing else uses."""

    def load(name):
        spec = spec_from_file_location(f"stand_in_{name}", Path(fake_cudnn, f"{name}.py"))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
