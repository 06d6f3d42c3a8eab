"""Compressed gradients in GPU memory, which give the same means as in host memory."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.compression import Compression, PowerSGD, Quantization, TopK
from chainermn.gradients.compressor import Compressor
from chainermn.transport.topology import Topology

WORLD = MPI.COMM_WORLD
SHAPES = {"a": (40, 30), "b": (24, 3, 3, 5), "c": (7,)}
STEPS = 4

COMPRESSIONS = pytest.mark.parametrize(
    "compression",
    [
        PowerSGD(rank=2, min_ratio=1, start_iteration=1),
        TopK(density=0.1, momentum=0.5, min_size=100),
        Quantization(block=16, min_size=100),
    ],
    ids=lambda compression: type(compression).__name__,
)


def averaged(comm: Any, compression: Compression, place: Any) -> list[dict[str, Any]]:
    compressor = Compressor(compression)
    model = chainer.Link()
    with model.init_scope():
        for key, shape in SHAPES.items():
            setattr(model, key, chainer.Parameter(place(np.zeros(shape, np.float32))))
    results = []
    for step in range(STEPS):
        for key, shape in SHAPES.items():
            random = np.random.default_rng([comm.rank, step, ord(key)])
            getattr(model, key).grad = place(random.normal(size=shape).astype(np.float32))
        comm.gradients.mean(model, True, compressor=compressor)
        results.append({key: getattr(model, key).grad.copy() for key in SHAPES})
    comm.finalize()
    return results


def assert_as_in_host_memory(
    gpu: Any, comm: Any, compression: Compression, tolerance: float
) -> list[dict[str, Any]]:
    """Compare the means on the GPU with those in host memory, and return them."""
    on_gpu = averaged(comm, compression, gpu.to_gpu)
    in_host_memory = averaged(chainermn.create_communicator("naive"), compression, np.array)
    # Where sums differ in the last digit, a code may differ by one.
    atol = 0.02 if isinstance(compression, Quantization) else tolerance
    for one, other in zip(on_gpu, in_host_memory, strict=True):
        for key, mean in one.items():
            assert gpu.holds(mean)
            np.testing.assert_allclose(
                gpu.to_host(mean), other[key], rtol=10 * tolerance, atol=atol
            )
    return on_gpu


@pytest.mark.gpu
@pytest.mark.mpi(1, 2)
@COMPRESSIONS
def test_by_mpi(a_gpu: Any, compression: Compression) -> None:
    comm = chainermn.create_communicator("naive")
    assert_as_in_host_memory(a_gpu, comm, compression, 1e-4)


@pytest.mark.gpu
@pytest.mark.mpi(1, 2)
@COMPRESSIONS
def test_by_nccl(a_gpu: Any, with_nccl: None, compression: Compression) -> None:
    comm = chainermn.create_communicator("pure_nccl")
    assert_as_in_host_memory(a_gpu, comm, compression, 1e-4)


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("name", sorted(set(registered()) - {"dummy"}))
@COMPRESSIONS
def test_without_a_gpu(stand_in: Any, name: str, compression: Compression) -> None:
    hosts = "a" * WORLD.size if name == "single_node" else ("ab" * WORLD.size)[: WORLD.size]
    if name == "two_dimensional" and WORLD.size % 2:
        hosts = "a" * WORLD.size
    comm = registered()[name](WORLD, topology=Topology.from_hosts(hosts, WORLD.rank))
    for means in assert_as_in_host_memory(stand_in, comm, compression, 1e-5):
        for mean in means.values():
            assert len(set(WORLD.allgather(mean.tobytes()))) == 1
