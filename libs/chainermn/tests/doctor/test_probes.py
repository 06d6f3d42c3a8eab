"""The probes: what they find here, and where something is wrong."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any

import chainer
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.doctor.probe import ask
from chainermn.doctor.probes import (
    chainer_computes,
    communicators,
    cuda,
    links,
    surroundings,
)

WORLD = MPI.COMM_WORLD


@pytest.mark.each_mpi
@pytest.mark.mpi(1, 2, 3)
def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_SECONDS", 0.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "abc"[WORLD.rank])
    measured = links.examine()
    if WORLD.rank:
        assert measured is None
        return
    assert measured is not None
    pairs = ["".join(pair) for pair in itertools.combinations("abc"[: WORLD.size], 2)]
    assert ["".join(link["hosts"]) for link in measured] == pairs
    assert all(link["latency"] > 0 and link["bandwidth"] > 0 for link in measured)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("size", [0, links.SMALL_BYTES, links.LARGE_BYTES])
def test_time_of_a_message_is_half_of_a_round_trip(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock on which each look is a second after the one before: five trips take a second each.
    clock = itertools.count()
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    assert links.ping_pong(WORLD, (1, 0), size) == 0.5


@pytest.mark.each_mpi
@pytest.mark.mpi(3)
def test_what_each_rank_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_RANK", str(WORLD.rank))
    everywhere = surroundings.examine()
    if WORLD.rank:
        assert everywhere is None
        return
    assert everywhere is not None
    assert [rank["host"] for rank in everywhere] == [socket.gethostname()] * 3
    assert [rank["environment"]["OF_THIS_RANK"] for rank in everywhere] == ["0", "1", "2"]
    assert everywhere[0]["environment"]["PATH"] == os.environ["PATH"]


def test_chainer_that_computes_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chainer_computes.examine() == []
    linear = chainer.links.Linear.forward
    monkeypatch.setattr(
        chainer.links.Linear, "forward", lambda *arguments: -2 * linear(*arguments)
    )
    assert chainer_computes.examine() == [
        "the forward pass of a Linear link",
        "the backward pass of a Linear link",
    ]


@pytest.mark.mpi(1, 2)
def test_communicators_compute_exact_means() -> None:
    results = communicators.examine()
    if WORLD.rank:
        assert results is None
        return
    assert results is not None
    right = dict.fromkeys(communicators.DTYPES, "right")
    assert {"naive", "flat", "hierarchical", "two_dimensional", "single_node"} <= set(results)
    assert {name: result for name, result in results.items() if result != right} == {}
    assert not {"pure_nccl", "dummy"} & set(results)


@pytest.mark.parametrize(
    ("hosts", "left_out"),
    [("aa", set()), ("ab", {"single_node"}), ("aab", {"single_node", "two_dimensional"})],
)
def test_communicators_that_do_not_fit_the_hosts_are_left_out(
    hosts: str, left_out: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [hosts.count(host) for host in hosts]
    world = SimpleNamespace(
        size=len(hosts),
        inter_size=len(set(hosts)),
        intra_size=places[0],
        allgather_obj=lambda first: [first, *(n * len(set(hosts)) != len(hosts) for n in places)],
        gather_obj=lambda results: [results],
    )

    def create(name: str) -> Any:
        if name == "naive":
            return world
        raise RuntimeError(f"no {name} now")

    monkeypatch.setattr(chainermn, "create_communicator", create)
    results = communicators.examine()
    assert results is not None
    assert set(registered()) - set(results) == {"pure_nccl", "dummy"} | left_out
    assert results["flat"] == dict.fromkeys(communicators.DTYPES, "RuntimeError: no flat now")


class FakeDriver:
    """In the place of ``libcuda.so.1``."""

    def __init__(self, code: int, names: list[str]) -> None:
        self._names = names
        self.cuInit = lambda flags: code

    def cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 13020

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self._names)

    def cuDeviceGetName(self, buffer: Any, length: int, number: int) -> None:
        assert length == len(buffer)
        buffer.value = self._names[number].encode()

    def cuDeviceTotalMem_v2(self, size: Any, number: int) -> None:
        size._obj.value = (number + 1) << 30


@pytest.mark.parametrize(
    ("code", "error", "gpus"),
    [
        (0, "", [["H200", 1024], ["H100", 2048]]),
        (cuda.NO_DEVICE, "", []),
        (803, "cuInit fails with error 803", []),
    ],
)
def test_cuda_driver(
    code: int, error: str, gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(code, ["H200", "H100"]))
    monkeypatch.setattr(cuda.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert cuda.examine() == {
        "library": "13.2",
        "error": error,
        "devices": ["/dev/nvidia0"],
        "gpus": gpus,
    }


# ---- asking ----


def test_command_that_cannot_be_started() -> None:
    outcome = ask(["/nowhere/python"], 60)
    assert outcome.answer is None
    assert "No such file or directory" in outcome.failure


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (f"import os; os.kill(os.getpid(), {signal.SIGSEGV:d})", "crashed with SIGSEGV"),
        (
            "print('nonsense'); raise SystemExit('told\\n--')",
            "ended with exit code 1 and no answer: told",
        ),
        ("", "ended with exit code 0 and no answer"),
        (
            "print('chainermn-doctor-answer [1'); raise SystemExit(3)",
            "ended with exit code 3 and no answer",
        ),
    ],
)
def test_process_that_does_not_answer(code: str, failure: str) -> None:
    outcome = ask([sys.executable, "-c", code], 60)
    assert (outcome.answers, outcome.failure) == ([], failure)
