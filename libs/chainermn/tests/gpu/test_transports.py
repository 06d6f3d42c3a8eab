"""NCCL and MPI on the memory of a real GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from chainermn.doctor.probes import device_memory
from chainermn.transport.gpu.cuda_awareness import is_cuda_aware
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.gpu.nccl import NcclTransport
from chainermn.transport.gpu.staging import Staging
from chainermn.transport.gpu.transports import GpuMpiTransport
from chainermn.transport.host.mpi import MpiTransport
from chainermn.transport.reducer import shard_bounds

pytestmark = pytest.mark.gpu
WORLD = MPI.COMM_WORLD
DTYPES = ["int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype("f8")


def parts(n: int, dtype: np.dtype) -> list[np.ndarray]:
    return [((np.arange(n) * (rank + 1)) % 5).astype(dtype) for rank in range(WORLD.size)]


@pytest.mark.mpi(1, 2, 3, timeout=120)
@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("name", DTYPES)
def test_nccl(a_gpu: Any, name: str) -> None:
    transport, dtype = NcclTransport(WORLD, the_gpu()), dtype_of(name)
    right, left = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
    for n in (1, 12, 1001):
        everywhere = parts(n, dtype)
        total = sum(wide(part) for part in everywhere)
        own = a_gpu.to_gpu(everywhere[WORLD.rank])
        transport.allreduce(own)
        np.testing.assert_array_equal(wide(a_gpu.to_host(own)), total)
        own = a_gpu.to_gpu(everywhere[WORLD.rank])
        transport.reduce(own, 0)
        transport.bcast(own, 0)
        np.testing.assert_array_equal(wide(a_gpu.to_host(own)), total)
        own = a_gpu.to_gpu(everywhere[WORLD.rank])
        shard = transport.reduce_scatter(own)
        begin, end = shard_bounds(n, WORLD.size)[WORLD.rank]
        np.testing.assert_array_equal(wide(a_gpu.to_host(shard)), total[begin:end])
        transport.allgather(own)
        np.testing.assert_array_equal(wide(a_gpu.to_host(own)), total)
        own, into = a_gpu.to_gpu(everywhere[WORLD.rank]), a_gpu.to_gpu(np.zeros(n, dtype))
        transport.sendrecv(own, right, into, left)
        np.testing.assert_array_equal(wide(a_gpu.to_host(into)), wide(everywhere[left]))
    transport.close()


@pytest.mark.mpi(1, 2, 3, timeout=120)
@pytest.mark.parametrize("n", [1, 1000, 5_000_000])
def test_mpi_through_host_memory(a_gpu: Any, n: int) -> None:
    transport = GpuMpiTransport(MpiTransport(WORLD), Staging(the_gpu()))
    everywhere = parts(n, np.dtype("f4"))
    own = a_gpu.to_gpu(everywhere[WORLD.rank])
    transport.allreduce(own)
    np.testing.assert_array_equal(a_gpu.to_host(own), sum(everywhere))
    own = a_gpu.to_gpu(everywhere[WORLD.rank])
    transport.bcast(own, WORLD.size - 1)
    np.testing.assert_array_equal(a_gpu.to_host(own), everywhere[-1])


@pytest.mark.mpi(2, timeout=120)
@pytest.mark.usefixtures("a_gpu")
def test_mpi_that_is_cuda_aware() -> None:
    if not is_cuda_aware():
        pytest.skip("CHAINERMN_CUDA_AWARE=1 does not say that MPI takes GPU memory")
    assert device_memory() is (True if WORLD.rank == 0 else None)
