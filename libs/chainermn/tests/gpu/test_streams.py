"""Memory shared by several streams of a real GPU."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest

import chainermn

pytestmark = pytest.mark.gpu

STEPS, N = 20, 1000


def check_double_buffering(a_gpu: Any, name: str) -> None:
    """Train with gradients copied or missing, while memory of their size is reused constantly."""

    def train(place: Any) -> list[Any]:
        comm, model = chainermn.create_communicator(name), chainer.Link()
        with model.init_scope():
            for key in "abcd":
                setattr(model, key, chainer.Parameter(place(np.zeros((N, N), np.float32))))
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(1.0), comm, double_buffering=True, zero_fill=True
        ).setup(model)
        values = place(np.arange(N * N, dtype=np.float32).reshape(N, N) / (N * N))
        for step in range(STEPS):
            model.cleargrads()
            model.a.grad = model.b.grad = values * (step + comm.rank)
            model.c.grad = (values + step).T
            if comm.rank == 0:
                model.d.grad = values - step
            optimizer.update()
            for _ in range(8):
                values + np.float32(1e6)
        optimizer.wait()
        comm.finalize()
        return [parameter.array for _, parameter in sorted(model.namedparams())]

    for found, expected in zip(train(a_gpu.to_gpu), train(np.array), strict=True):
        np.testing.assert_allclose(a_gpu.to_host(found), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.mpi(1, 2, timeout=120)
def test_double_buffering_by_mpi(a_gpu: Any) -> None:
    check_double_buffering(a_gpu, "flat")


@pytest.mark.mpi(1, 2, timeout=120)
@pytest.mark.usefixtures("with_nccl")
def test_double_buffering_by_nccl(a_gpu: Any) -> None:
    check_double_buffering(a_gpu, "pure_nccl")
