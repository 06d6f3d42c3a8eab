"""Compressed gradients in GPU memory, which give the same means as in host memory."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest

import chainermn
from chainermn.compression import Compression, PowerSGD, Quantization, TopK

pytestmark = pytest.mark.gpu

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


def averaged(name: str, compression: Compression, place: Any) -> list[dict[str, Any]]:
    comm = chainermn.create_communicator(name)
    compressor = comm.create_compressor(compression)
    model = chainer.Link()
    with model.init_scope():
        for key, shape in SHAPES.items():
            setattr(model, key, chainer.Parameter(place(np.zeros(shape, np.float32))))
    results = []
    for step in range(STEPS):
        for key, shape in SHAPES.items():
            random = np.random.default_rng([comm.rank, step, ord(key)])
            getattr(model, key).grad = place(random.normal(size=shape).astype(np.float32))
        comm.mean_grad_unless([], model, True, compressor)
        results.append({key: getattr(model, key).grad.copy() for key in SHAPES})
    comm.finalize()
    return results


def assert_as_in_host_memory(a_gpu: Any, name: str, compression: Compression) -> None:
    on_gpu = averaged(name, compression, a_gpu.to_gpu)
    in_host_memory = averaged("naive", compression, np.array)
    # Where sums differ in the last digit, a code may differ by one.
    atol = 0.02 if isinstance(compression, Quantization) else 1e-4
    for one, other in zip(on_gpu, in_host_memory, strict=True):
        for key, mean in one.items():
            assert a_gpu.holds(mean)
            np.testing.assert_allclose(a_gpu.to_host(mean), other[key], rtol=1e-3, atol=atol)


@pytest.mark.mpi(1, 2)
@COMPRESSIONS
def test_by_mpi(a_gpu: Any, compression: Compression) -> None:
    assert_as_in_host_memory(a_gpu, "naive", compression)


@pytest.mark.mpi(1, 2)
@COMPRESSIONS
def test_by_nccl(a_gpu: Any, with_nccl: None, compression: Compression) -> None:
    assert_as_in_host_memory(a_gpu, "pure_nccl", compression)
