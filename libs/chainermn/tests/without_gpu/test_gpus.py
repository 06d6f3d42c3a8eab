"""Why ranks cannot use GPUs, in words."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from chainermn.transport.gpu import device as gpu
from chainermn.transport.gpu.available import why_no_gpu, why_no_nccl, why_not_one_each
from chainermn.transport.topology import Topology


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(gpu.sys.modules, "cupy", raising=False)
    assert why_no_gpu() == "CuPy is not installed, or cannot be imported"
    assert why_no_nccl() == why_no_gpu()
    with pytest.raises(
        RuntimeError, match="sends an array in GPU memory, but this rank has no GPU"
    ):
        gpu.the_gpu()


def test_no_device(stand_in: Any) -> None:
    assert why_no_gpu() is None
    stand_in.visible = 0
    assert why_no_gpu() == "there is no CUDA device"
    assert why_no_nccl() == "there is no CUDA device"


def test_driver_that_fails(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> list[str]:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(stand_in, "devices", devices)
    assert why_no_gpu() == "CUDA does not answer (cudaErrorInsufficientDriver)"


def test_cupy_without_nccl(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nccl() -> Any:
        raise ImportError("CuPy finds no NCCL library")

    assert why_no_nccl() is None
    monkeypatch.setattr(stand_in, "nccl", nccl)
    assert why_no_nccl() == "CuPy finds no NCCL library"


def test_cupy_that_warns_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the reason without CuPy 14.2's warning, so that nobody reads it twice."""

    class Cuda(ModuleType):
        @property
        def nccl(self) -> Any:
            warnings.warn("nccl library could not be loaded", stacklevel=1)
            return SimpleNamespace(available=False)

    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", Cuda("cupy.cuda"))
    with pytest.raises(ImportError, match="CuPy finds no NCCL library; install it"):
        gpu.Gpu.nccl()


@pytest.mark.mpi(3)
@pytest.mark.parametrize(
    ("visible", "reason"),
    [
        ([8, 8, 8], None),
        ([3, 3, 3], None),
        ([2, 2, 2], "a host has 3 ranks, but only 2 GPUs"),
        ([2, 0, 2], "on rank 1, there is no CUDA device"),
    ],
)
def test_same_answer_on_all_ranks(visible: list[int], reason: str | None, stand_in: Any) -> None:
    world = MPI.COMM_WORLD
    stand_in.visible = visible[world.rank]
    assert why_not_one_each(world, Topology.of(world)) == reason
