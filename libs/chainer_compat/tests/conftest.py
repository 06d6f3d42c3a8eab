"""Shared fixtures: code in a fresh interpreter, and kernels on the CPU."""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest


def pytest_configure(config):
    # chainer.testing uses these marks on import.
    for mark in ("chainerx", "cudnn", "gpu", "ideep", "slow"):
        config.addinivalue_line("markers", f"{mark}: a mark of chainer.testing")


@pytest.fixture(scope="session")
def execute():
    """Run a command without the caller's settings for Python and this package."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "CHAINER_COMPAT_"))
    }

    def run(*command, **environment):
        return subprocess.run(
            list(map(str, command)),
            env={**clean, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def python(execute):
    """Run ``python FLAGS -c CODE``; return its output, or its errors if it should fail."""

    def run(code, *flags, fails=False, **environment):
        result = execute(sys.executable, *flags, "-c", code, **environment)
        assert (result.returncode != 0) == fails, result.stdout + result.stderr
        return result.stderr if fails else result.stdout.strip()

    return run


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return a function that compiles C++ with float16, and loads it as a library."""
    for compiler in filter(shutil.which, ("g++", "clang++")):
        check = [compiler, "-x", "c++", "-fsyntax-only", "-"]
        if subprocess.run(check, input=b"_Float16 x;", stderr=subprocess.DEVNULL).returncode == 0:
            break
    else:
        pytest.skip("no C++ compiler that knows _Float16, as GCC does from 12 on")
    options = ["-x", "c++", "-std=c++17", "-shared", "-fPIC", "-O1", "-ffp-contract=off", "-w"]

    @functools.cache
    def compile_(source):
        library = tmp_path_factory.mktemp("compiled") / "kernel.so"
        command = [compiler, *options, "-o", library, "-"]
        subprocess.run(command, input=source, text=True, check=True)
        return ctypes.CDLL(str(library))

    return compile_


@pytest.fixture(scope="session")
def fake_cupy():
    """Return a directory for PYTHONPATH that makes Chainer think CuPy 14 is installed."""
    return str(Path(__file__).parent / "fake_cupy")


@pytest.fixture(scope="session")
def fake_cudnn():
    """Return a directory for PYTHONPATH whose ``cudnn`` computes with NumPy, in host memory."""
    return str(Path(__file__).parent / "fake_cudnn")


@pytest.fixture
def stand_in(fake_cudnn):
    """Load a module from that directory afresh, under a name that nothing else uses."""

    def load(name):
        spec = spec_from_file_location(f"stand_in_{name}", Path(fake_cudnn, f"{name}.py"))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
