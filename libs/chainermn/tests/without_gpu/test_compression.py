"""Compressed gradients in GPU memory, which give the same means as in host memory."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest
from mpi4py import MPI

from chainermn.communicators import registered
from chainermn.compression import Compression, PowerSGD, Quantization, TopK
from chainermn.transport.topology import Topology

WORLD = MPI.COMM_WORLD
EXCHANGING = sorted(set(registered()) - {"dummy"})
SHAPES = {"a": (40, 30), "b": (24, 3, 3, 5), "c": (7,)}
STEPS = 4


def averaged(name: str, compression: Compression, place: Any) -> list[dict[str, Any]]:
    hosts = "a" * WORLD.size if name == "single_node" else ("ab" * WORLD.size)[: WORLD.size]
    if name == "two_dimensional" and WORLD.size % 2:
        hosts = "a" * WORLD.size
    comm = registered()[name](WORLD, topology=Topology.from_hosts(hosts, WORLD.rank))
    compressor = comm.create_compressor(compression)
    model = chainer.Link()
    with model.init_scope():
        for key, shape in SHAPES.items():
            setattr(model, key, chainer.Parameter(place(np.zeros(shape, np.float32))))
    results = []
    for step in range(STEPS):
        for key, shape in SHAPES.items():
            random = np.random.default_rng([WORLD.rank, step, ord(key)])
            getattr(model, key).grad = place(random.normal(size=shape).astype(np.float32))
        comm.mean_grad_unless([], model, True, compressor)
        results.append({key: getattr(model, key).grad.copy() for key in SHAPES})
    comm.finalize()
    return results


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("name", EXCHANGING)
@pytest.mark.parametrize(
    "compression",
    [
        PowerSGD(rank=2, min_ratio=1, start_iteration=1),
        TopK(density=0.1, momentum=0.5, min_size=100),
        Quantization(block=16, min_size=100),
    ],
    ids=lambda compression: type(compression).__name__,
)
def test_as_in_host_memory(stand_in: Any, name: str, compression: Compression) -> None:
    on_gpu = averaged(name, compression, stand_in.to_gpu)
    in_host_memory = averaged("naive", compression, np.array)
    for step, (one, other) in enumerate(zip(on_gpu, in_host_memory, strict=True)):
        for key, mean in one.items():
            assert type(mean).__name__ == "GpuArray"
            # Where sums differ in the last digit, a code may differ by one.
            atol = 0.02 if isinstance(compression, Quantization) else 1e-5
            np.testing.assert_allclose(mean, other[key], rtol=1e-4, atol=atol, err_msg=step)
            assert len(set(WORLD.allgather(mean.tobytes()))) == 1
