"""Arrays in GPU memory, sent over MPI through host memory and directly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from chainermn.transport.gpu import staging
from chainermn.transport.gpu.reducers import GpuMpiReducer
from chainermn.transport.gpu.staging import Direct, Staging
from chainermn.transport.gpu.transports import GpuMpiTransport
from chainermn.transport.host.arithmetic import Adder
from chainermn.transport.host.mpi import MpiTransport
from chainermn.transport.host.mpi_reducer import MpiReducer

WORLD = MPI.COMM_WORLD
# With 64-byte chunks: none, up to one, a little more, as many as there are slots, and more.
SIZES = [0, 1, 8, 9, 24, 25, 100]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 64)


@pytest.fixture(params=[Staging, Direct])
def transport(stand_in: Any, request: pytest.FixtureRequest) -> GpuMpiTransport:
    return GpuMpiTransport(MpiTransport(WORLD), request.param(stand_in))


def parts(n: int, dtype: str = "f8") -> list[np.ndarray]:
    return [np.random.default_rng([n, rank]).normal(size=n).astype(dtype) for rank in range(3)]


@pytest.mark.mpi(1, 2, 3)
def test_collectives(stand_in: Any, transport: GpuMpiTransport) -> None:
    for n in SIZES:
        for op, reduction in {"sum": np.sum, "max": np.max, "mean": np.mean}.items():
            own = stand_in.to_gpu(parts(n)[WORLD.rank])
            transport.allreduce(own, op)
            expected = reduction(parts(n)[: WORLD.size], axis=0)
            np.testing.assert_allclose(own, expected, rtol=1e-15)
        root = n % WORLD.size
        own = stand_in.to_gpu(parts(n)[WORLD.rank])
        transport.bcast(own, root)
        np.testing.assert_array_equal(own, parts(n)[root])


@pytest.mark.mpi(2, 3)
def test_messages(stand_in: Any, transport: GpuMpiTransport) -> None:
    right, left = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
    for n in SIZES:
        # The higher the rank, the longer its message to the right.
        own, into = (np.arange(n * (rank + 1), dtype="f8") for rank in (WORLD.rank, left))
        received = stand_in.to_gpu(np.zeros_like(into))
        transport.sendrecv(stand_in.to_gpu(own), right, received, left)
        np.testing.assert_array_equal(received, into)
        if WORLD.rank == 0:
            transport.send(stand_in.to_gpu(own), 1, 5)
        elif WORLD.rank == 1:
            received = stand_in.to_gpu(np.zeros(n))
            transport.recv(received, 0, 5)
            np.testing.assert_array_equal(received, np.arange(n))


@pytest.mark.mpi(2)
def test_one_rank_staged_the_other_direct(stand_in: Any) -> None:
    access = (Staging, Direct)[WORLD.rank](stand_in)
    transport = GpuMpiTransport(MpiTransport(WORLD), access)
    own = stand_in.to_gpu(parts(100)[0])
    for source in (0, 1):
        if WORLD.rank == source:
            transport.send(own, 1 - source, 3)
        else:
            received = stand_in.to_gpu(np.zeros(100))
            transport.recv(received, source, 3)
            np.testing.assert_array_equal(received, parts(100)[0])


def test_next_chunk_is_copied_while_one_is_used(stand_in: Any) -> None:
    array = stand_in.to_gpu(np.arange(20.0))
    seen = []
    for ready, chunk in Staging(stand_in).chunks(array, read=True, written=True):
        ready.Wait()
        seen.append((chunk.tolist(), stand_in.log.count("copy_to_host")))
        chunk *= 2
    assert seen == [
        (list(range(8)), 2),
        (list(range(8, 16)), 3),
        (list(range(16, 20)), 3),
    ]
    assert stand_in.log[:4] == ["copy_to_host", "copy_to_host", "copy_to_gpu", "copy_to_host"]
    np.testing.assert_array_equal(array, np.arange(20.0) * 2)


def test_only_what_is_needed_is_copied(stand_in: Any) -> None:
    array = stand_in.to_gpu(np.arange(20.0))
    list(Staging(stand_in).chunks(array, read=True, written=False))
    assert stand_in.log == ["copy_to_host"] * 3
    stand_in.log.clear()
    list(Staging(stand_in).chunks(array, read=False, written=True))
    assert stand_in.log == ["copy_to_gpu"] * 3
    stand_in.log.clear()
    list(Direct(stand_in).chunks(array, read=True, written=True))
    assert stand_in.log == []


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_reducers(stand_in: Any, dtype: str) -> None:
    reducer = GpuMpiReducer(MpiReducer(WORLD, Adder()), stand_in)
    for n in SIZES:
        everywhere = parts(n, dtype)[: WORLD.size]
        own = stand_in.to_gpu(everywhere[WORLD.rank])
        for pending in reducer.allreduce(own, WORLD.size):
            pending.Wait()
        wide = np.float32 if dtype == "float16" else dtype
        expected = np.mean([part.astype(wide) for part in everywhere], axis=0).astype(dtype)
        tolerance = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-15}[dtype]
        np.testing.assert_allclose(own, expected, rtol=tolerance, atol=tolerance)
        same = WORLD.allgather(np.asarray(own).tobytes())
        assert len(set(same)) == 1
