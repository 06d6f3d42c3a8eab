"""What ``gpu_tests`` does on machines with too few GPUs, and with many."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "gpu/conftest.py"
TWO_GPUS = """
import sys
from types import SimpleNamespace

import numpy
from chainermn.transport.gpu import device

class Two(device.Gpu):
    def __init__(self):
        pass

    def nccl(self):
        return SimpleNamespace(get_version=lambda: 23000)

    def devices(self):
        return ["0", "1"]

device.use(Two())
cuda = SimpleNamespace(
    Device=lambda number: SimpleNamespace(use=lambda: None),
    runtime=SimpleNamespace(getDeviceCount=lambda: 2),
)
sys.modules["cupy"] = SimpleNamespace(cuda=cuda, ndarray=numpy.ndarray)
pytest_plugins = ["chainermn.testing.pytest_plugin"]
"""
TESTS = """
import os
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.gpu

@pytest.mark.mpi(1, timeout=60)
def test_ranks(mpi_ranks):
    assert MPI.COMM_WORLD.size == mpi_ranks

@pytest.mark.mpi(1, 2, 3, timeout=60)
def test_shares(with_nccl, mpi_ranks):
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in os.environ) == (mpi_ranks > 2)

@pytest.mark.mpi(1, timeout=60)
def test_skips_on_a_rank(mpi_ranks):
    pytest.skip("lacks something")

def test_skips_here():
    pytest.skip("lacks something")
"""
Run: TypeAlias = Callable[..., SimpleNamespace]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs tests as ``gpu_tests`` does, with two GPUs."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    (tmp_path / "conftest.py").write_text(TWO_GPUS)
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")

    def run(*options: str) -> SimpleNamespace:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu"]
        env = {name: value for name, value in os.environ.items() if name[:5] != "NCCL_"}
        ended = subprocess.run(
            [*command, *options, "gpu"], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        outcomes = dict(re.findall(r"::(\S+) (PASSED|SKIPPED|FAILED)", ended.stdout))
        return SimpleNamespace(code=ended.returncode, outcomes=outcomes, text=str(ended))

    return run


def test_ranks_and_gpus(run: Run) -> None:
    """Also run as many ranks as there are GPUs; share GPUs only if there are too few."""
    ended = run("--require-gpus", "2", "-k", "not skips")
    passed = ["ranks[n=1]", "ranks[n=2]", "shares[n=1]", "shares[n=2]", "shares[n=3]"]
    assert ended.outcomes == {f"test_{name}": "PASSED" for name in passed}, ended.text
    assert ended.code == 0
    assert "NOT TESTED" not in ended.text


def test_skipped_is_not_tested(run: Run) -> None:
    ended = run("-k", "test_skips_here")
    assert ended.outcomes == {"test_skips_here": "SKIPPED"}, ended.text
    assert ended.code == 0
    assert "\\nNOT TESTED on a GPU: 1 skipped\\n" in ended.text


def test_skipped_is_a_failure_where_gpus_are_required(run: Run) -> None:
    ended = run("-k", "test_skips_on_a_rank", "--mpi-ranks", "1", "--require-gpus", "2")
    assert ended.outcomes == {"test_skips_on_a_rank[n=1]": "SKIPPED"}, ended.text
    assert ended.code == 1
    assert "NOT TESTED on a GPU: 1 skipped, which --require-gpus takes for a failure" in ended.text


def test_too_few_gpus(run: Run) -> None:
    ended = run("--require-gpus", "3")
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    assert "--require-gpus: expected at least 3: found 2" in ended.text
