"""One GPU per rank; ranks share GPUs if there are too few.

Use ``--require-gpus 2`` on a machine meant for these tests: they fail if it has fewer than two
GPUs, or if any test is skipped.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from chainermn.transport.gpu.available import why_no_gpu, why_no_nccl
from chainermn.transport.gpu.device import the_gpu

# chainermn finds GPUs only once CuPy has been imported, which not every test does itself.
with contextlib.suppress(ImportError):
    import cupy  # noqa: F401

# NCCL 2.30 and newer accept several ranks on one GPU, but not with all features.
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
_FIRST_NCCL_FOR_SHARED_GPU = 23000


class RealGpu:
    """The GPU of this rank."""

    def __init__(self, rank: int) -> None:
        import cupy

        self._cupy = cupy
        self.count = cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(rank % self.count).use()

    def to_gpu(self, array: Any) -> Any:
        return self._cupy.asarray(array)

    def to_host(self, array: Any) -> np.ndarray:
        return self._cupy.asnumpy(array)

    def holds(self, array: Any) -> bool:
        return isinstance(array, self._cupy.ndarray)

    def free_memory(self) -> int:
        self._cupy.get_default_memory_pool().free_all_blocks()
        return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def hold(self, until: Callable[[], Any]) -> None:
        """Make the current stream wait for ``until`` to return; ``until`` must not use the GPU."""
        stream = self._cupy.cuda.get_current_stream()
        stream.launch_host_func(lambda _: until(), None)


@pytest.fixture
def a_gpu() -> RealGpu:
    """Choose a GPU for this rank."""
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(reason)
    from mpi4py import MPI

    return RealGpu(MPI.COMM_WORLD.rank)


@pytest.fixture
def with_nccl(a_gpu: RealGpu, mpi_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip unless NCCL accepts this many ranks; let them share GPUs only if there are too few."""
    prepare_nccl(a_gpu, mpi_ranks, monkeypatch)


@pytest.fixture
def with_nccl_for_two(a_gpu: RealGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the same for a two-rank job that the test starts."""
    prepare_nccl(a_gpu, 2, monkeypatch)


def prepare_nccl(a_gpu: RealGpu, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_no_nccl()
    if reason is not None:
        pytest.skip(reason)
    if ranks > a_gpu.count:
        version = the_gpu().nccl().get_version()
        if version < _FIRST_NCCL_FOR_SHARED_GPU:
            pytest.skip(
                f"{ranks} ranks, but GPUs: {a_gpu.count}; NCCL {version} takes no two on one"
            )
        for name, value in SHARED_GPU.items():
            monkeypatch.setenv(name, os.environ.get(name, value))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--require-gpus``."""
    parser.addoption(
        "--require-gpus",
        type=int,
        metavar="N",
        help="fail if there are fewer GPUs, or if a test is skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Fail at once if there are too few GPUs."""
    if (wanted := required(config)) > number_of_gpus():
        found = why_no_nccl() or f"found {number_of_gpus()}"
        raise pytest.UsageError(f"--require-gpus: expected at least {wanted}: {found}")


def required(config: pytest.Config) -> int:
    """Return how many GPUs are required; 0 if the session may run without any."""
    return config.getoption("--require-gpus", 0) or 0


@functools.cache
def number_of_gpus() -> int:
    """Return how many GPUs this process sees; 0 without NCCL."""
    return 0 if why_no_nccl() else len(the_gpu().devices())


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Also run each MPI test with one rank per GPU, if that is more ranks than it asks for."""
    marker = metafunc.definition.get_closest_marker("mpi")
    if marker is not None and number_of_gpus() > max(marker.args):
        more = pytest.mark.mpi(*marker.args, number_of_gpus(), **marker.kwargs)
        metafunc.definition.add_marker(more, append=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if GPUs are required and a test was skipped."""
    if required(session.config) and skipped(session.config):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    """Say at the very end that skipped tests have tested nothing."""
    yield
    if config.option.markexpr == "gpu" and (count := skipped(config)):
        verdict = ", which --require-gpus takes for a failure" if required(config) else ""
        terminalreporter.write_line(f"NOT TESTED on a GPU: {count} skipped{verdict}", yellow=True)


def skipped(config: pytest.Config) -> int:
    """Return how many tests were skipped."""
    return len(config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped", ()))
