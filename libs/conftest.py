"""Fixtures of chainer_compat and chainer_fast: code in a fresh interpreter, a fake CuPy, a GPU."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "chainer_compat/tests"


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
def fake_cupy():
    """Return a directory for PYTHONPATH that makes Chainer think CuPy 14 is installed."""
    return str(TESTS / "fake_cupy")


@pytest.fixture
def device():
    """Return the device that tests compute on, or skip and say why there is none."""
    import chainer
    from chainer.backends import cuda

    try:
        cuda.check_cuda_available()
        count = cuda.cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        pytest.skip(" ".join(str(error).split()))
    if count == 0:
        pytest.skip("there is no CUDA device")
    return chainer.get_device("@cupy:0")


@pytest.fixture(scope="session")
def failures(execute, fake_cupy):
    """Run the checks of repairs in fresh interpreters; return how each failed, or None."""

    @functools.cache
    def run(checks, repairs, *options):
        found = {}
        for with_cupy in (True, False):
            some = [repair for repair in repairs if _needs_cupy(repair) == with_cupy]
            environment = {repair.option: "1" for repair in some if repair.option}
            if with_cupy:
                fakes = (fake_cupy, checks.with_name("fake_cudnn"))
                environment["PYTHONPATH"] = os.pathsep.join(map(str, fakes))
            command = [sys.executable, "-W", "error", TESTS / "run_checks.py", checks, *options]
            result = execute(*command, *(repair.name for repair in some), **environment)
            assert result.returncode == 0, result.stderr
            found |= json.loads(result.stdout.splitlines()[-1])
        return found

    return run


@pytest.fixture(scope="session")
def is_at_fault():
    """Return whether Chainer has the fault of a repair where `failures` runs its check."""
    return lambda repair: _needs_cupy(repair) or repair.status()[0] == "active"


def _needs_cupy(repair):
    return repair.fault.__module__.endswith(".cupy14")
