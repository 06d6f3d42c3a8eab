"""Gradient clipping in GPU memory, by a norm that the host adds up over parts of a model."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest
from mpi4py import MPI

from chainermn.communicators import registered
from chainermn.optimizers import GradientClipping


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("threshold", [1.0, 100.0])
def test_norm_over_ranks(stand_in: Any, threshold: float) -> None:
    comm = registered()["naive"](MPI.COMM_WORLD)
    model = chainer.Link()
    with model.init_scope():
        model.a = chainer.Parameter(stand_in.to_gpu(np.zeros(4, "f")))
    model.a.grad = stand_in.to_gpu(np.full(4, 3, "f"))
    GradientClipping(threshold, comm)(chainer.optimizers.SGD().setup(model))
    assert stand_in.holds(model.a.grad)
    norm = np.sqrt(4 * 3**2 * comm.size)
    np.testing.assert_allclose(model.a.grad, 3 * min(1, threshold / norm), rtol=1e-6)
    comm.finalize()
