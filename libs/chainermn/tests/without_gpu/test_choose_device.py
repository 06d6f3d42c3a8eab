"""A device for each rank, with a stand-in for Chainer's that refuses what CUDA would."""

from __future__ import annotations

import sys
from typing import Any

import chainer
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.transport.gpu import device as gpu
from chainermn.transport.topology import Topology

WORLD = MPI.COMM_WORLD


class Device:
    """A device that raises what CuPy does if no device has its number."""

    in_use: str | None = None

    def __init__(self, name: str, visible: int) -> None:
        self.name = name
        self._visible = visible

    def use(self) -> None:
        _, _, number = self.name.partition(":")
        if number and int(number) >= self._visible:
            raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        Device.in_use = self.name


@pytest.fixture(autouse=True)
def devices(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "in_use", None)
    monkeypatch.setattr(chainer, "get_device", lambda name: Device(name, stand_in.visible))


def comm_on(hosts: str) -> Any:
    return registered()["naive"](WORLD, topology=Topology.from_hosts(hosts, WORLD.rank))


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(
    ("visible", "numbers"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (3, [0, 1, 2]), (8, [0, 1, 2])]
)
def test_ranks_share_the_gpus_that_they_see(
    stand_in: Any, visible: int, numbers: list[int]
) -> None:
    stand_in.visible = visible
    device = chainermn.choose_device(comm_on("a" * WORLD.size))
    assert device.name == Device.in_use == f"@cupy:{numbers[WORLD.rank]}"


@pytest.mark.mpi(3)
def test_each_host_has_its_own_gpus(stand_in: Any) -> None:
    device = chainermn.choose_device(comm_on("aba"))
    assert device.name == Device.in_use == ("@cupy:0", "@cupy:0", "@cupy:1")[WORLD.rank]


@pytest.mark.mpi(4)
@pytest.mark.parametrize(
    ("visible", "taken"),
    [
        (["ab", "ab", "ab", "ab"], "abab"),
        (["ab", "ab", "cd", "cd"], "abcd"),
        (["a", "b", "c", "d"], "abcd"),  # each rank sees only its own
        (["abcd", "bcda", "cdab", "dabc"], "abcd"),  # each rank sees its own first
        (["", "ab", "", "ab"], " a b"),  # some ranks compute on the CPU
    ],
)
def test_ranks_take_what_the_others_leave(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, visible: list[str], taken: str
) -> None:
    own, expected = visible[WORLD.rank], taken[WORLD.rank]
    monkeypatch.setattr(stand_in, "devices", lambda: list(own))
    device = chainermn.choose_device(comm_on("aaaa"), gpu=bool(own))
    assert device.name == ("@numpy" if expected == " " else f"@cupy:{own.index(expected)}")


@pytest.mark.mpi(2)
def test_on_the_cpu_no_gpu_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.use(None)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    device = chainermn.choose_device(comm_on("aa"), gpu=False)
    assert device.name == Device.in_use == "@numpy"


@pytest.mark.mpi(2)
def test_a_rank_without_a_gpu_makes_all_raise(stand_in: Any) -> None:
    stand_in.visible = 1 - WORLD.rank
    message = "no GPU can be used on .*: there is no CUDA device. Run `chainermn doctor` there"
    with pytest.raises(RuntimeError, match=message) as caught:
        chainermn.choose_device(comm_on("aa"))
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any("rank 1" in each for each in told)
    assert Device.in_use is None


@pytest.mark.mpi(2)
def test_a_gpu_that_refuses_makes_all_raise(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible = 8 * WORLD.rank  # rank 0's GPU has gone since it was seen
    monkeypatch.setattr(chainer, "get_device", lambda name: Device(name, visible))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        chainermn.choose_device(comm_on("aa"))
