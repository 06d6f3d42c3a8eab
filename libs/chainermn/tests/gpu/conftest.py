"""A GPU for each rank, or one for all where there is only one."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest

from chainermn.transport.gpu.available import why_no_gpu, why_no_nccl
from chainermn.transport.gpu.device import the_gpu

# chainermn finds a GPU only where CuPy has been imported, which not every test does by itself.
with contextlib.suppress(ImportError):
    import cupy  # noqa: F401

# NCCL 2.30 and newer takes several ranks on one GPU, but not with all that it can do.
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


@pytest.fixture
def a_gpu() -> RealGpu:
    """Choose a GPU for this rank."""
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(reason)
    from mpi4py import MPI

    return RealGpu(MPI.COMM_WORLD.rank)


@pytest.fixture
def with_nccl(a_gpu: RealGpu, mpi_ranks: int) -> None:
    """Skip unless NCCL takes as many ranks."""
    reason = why_no_nccl()
    if reason is not None:
        pytest.skip(reason)
    if mpi_ranks > a_gpu.count:
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "0":
            pytest.skip(f"{mpi_ranks} ranks, but GPUs: {a_gpu.count}; run with -m gpu to share")
        version = the_gpu().nccl().get_version()
        if version < _FIRST_NCCL_FOR_SHARED_GPU:
            pytest.skip(
                f"{mpi_ranks} ranks, but GPUs: {a_gpu.count}; NCCL {version} takes no two on one"
            )


def pytest_configure(config: pytest.Config) -> None:
    """Let ranks that are started from here share a GPU, where this is what is tested."""
    if config.option.markexpr == "gpu":
        for name, value in SHARED_GPU.items():
            os.environ.setdefault(name, value)
