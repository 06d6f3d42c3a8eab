"""Gradients in GPU memory that are sent as bfloat16, with a NumPy too old for CuPy."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest
from mpi4py import MPI

from chainermn.communicators import registered

WORLD = MPI.COMM_WORLD


@pytest.fixture
def old_numpy_on(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives one rank, or all, a NumPy too old for CuPy's bfloat16."""
    empty = stand_in.empty

    def refuse_bfloat16(n: int, dtype: Any) -> np.ndarray:
        if np.dtype(dtype).name == "bfloat16":
            raise ValueError("Unsupported dtype bfloat16")
        return empty(n, dtype)

    def make(rank: int | None) -> None:
        if rank in (None, WORLD.rank):
            monkeypatch.setattr(np, "__version__", "2.1.1")
            monkeypatch.setattr(stand_in, "empty", refuse_bfloat16)

    return make


def model_with(gradient: np.ndarray) -> chainer.Chain:
    model = chainer.Chain()
    with model.init_scope():
        model.w = chainer.Parameter(np.zeros_like(gradient))
    model.w.grad = gradient
    return model


@pytest.mark.mpi(2)
@pytest.mark.parametrize("rank", [None, 1])
def test_all_ranks_say_which_numpy_is_needed(stand_in: Any, old_numpy_on: Any, rank: Any) -> None:
    comm = registered()["pure_nccl"](WORLD, allreduce_grad_dtype="bfloat16")
    gradient = np.full(3, comm.rank, "f")
    old_numpy_on(rank)
    with pytest.raises(ValueError, match=r"needs NumPy 2\.1\.2 or newer.*numpy>=2\.1\.2"):
        comm.multi_node_mean_grad(model_with(stand_in.to_gpu(gradient)))
    model = model_with(gradient)  # in host memory, any NumPy does
    comm.multi_node_mean_grad(model)
    np.testing.assert_array_equal(model.w.grad, np.full(3, 0.5))
    comm.finalize()
