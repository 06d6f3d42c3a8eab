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
from chainermn.doctor import probes
from chainermn.doctor.probe import TAKING_TURNS, Outcome, ask
from chainermn.launch.mpiexec import launch_environment, mpiexec_command
from chainermn.transport.host import memory as library

WORLD = MPI.COMM_WORLD


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the clock advance by one second per reading."""
    clock = itertools.count()
    monkeypatch.setattr(probes, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))


@pytest.mark.mpi(2)
def test_exchange_is_timed_and_that_of_choice_in_bfloat16_too(steady_clock: None) -> None:
    answer = probes.exchange()
    if WORLD.rank:
        assert answer is None
        return
    assert answer is not None
    assert answer["use"] == "single_node"
    seconds = answer["seconds"]
    assert {"flat", "hierarchical", "naive", "two_dimensional"} <= set(seconds)
    assert {by["float32"] for by in seconds.values()} == {1.0}
    assert {name: by["bfloat16"] for name, by in seconds.items() if "bfloat16" in by} == {
        "single_node": 1.0
    }


@pytest.mark.parametrize(
    ("seconds", "choice"),
    [
        pytest.param((0.080, 0.090), "hierarchical", id="another is not clearly faster"),
        pytest.param((0.008, 0.010), "hierarchical", id="just as long as it may take"),
        pytest.param((0.071, 0.090), "flat", id="another is clearly faster"),
        pytest.param((0.090, 0.080), "hierarchical", id="it is the fastest"),
    ],
)
def test_choice_of_a_communicator(seconds: tuple[float, float], choice: str) -> None:
    measured = dict(zip(("flat", "hierarchical"), seconds, strict=True))
    assert probes.choose(measured, default="hierarchical") == choice


@pytest.mark.mpi(2)
def test_communicators_are_created_once_for_all_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[tuple[str, str | None]] = []
    create = chainermn.create_communicator

    def counted(name: str, *, allreduce_grad_dtype: str | None) -> Any:
        created.append((name, allreduce_grad_dtype))
        return create(name, allreduce_grad_dtype=allreduce_grad_dtype)

    monkeypatch.setattr(chainermn, "create_communicator", counted)
    probes.communicator.cache_clear()
    probes.communicators()
    probes.exchange()
    assert {"naive", "flat"} <= {name for name, _ in created}
    assert len(created) == len(set(created))


@pytest.mark.mpi(2)
def test_settings_are_timed_with_few_and_many_gradients(steady_clock: None) -> None:
    answer = probes.settings()
    if WORLD.rank:
        assert answer is None
        return
    low_rank = "compression=chainermn.compression.PowerSGD(rank=4)"
    settings = ["float32", "allreduce_grad_dtype='bfloat16'", low_rank]
    assert list(answer or ()) == settings
    for few, many in (answer or {}).values():
        assert few == (1024, 1.0)
        assert many[0] >= 1024**2
        assert many[1] == 1.0


@pytest.mark.mpi(2)
def test_ranks_of_a_host_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.shared_memory() == (None if WORLD.rank else "")
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(library, "DIRECTORY", "/nowhere")
    why = probes.shared_memory()
    if WORLD.rank == 0:
        assert why is not None
        assert "No such file or directory: '/nowhere" in why


@pytest.mark.each_mpi
@pytest.mark.mpi(3)
def test_what_each_rank_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_RANK", str(WORLD.rank))
    everywhere = probes.ranks()
    if WORLD.rank:
        assert everywhere is None
        return
    assert everywhere is not None
    assert [rank["host"] for rank in everywhere] == [socket.gethostname()] * 3
    assert [rank["environment"]["OF_THIS_RANK"] for rank in everywhere] == ["0", "1", "2"]
    assert everywhere[0]["environment"]["PATH"] == os.environ["PATH"]
    assert everywhere[0]["thread level"] == "MULTIPLE"


def test_chainer_that_computes_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.chainer_computes() == []
    linear = chainer.links.Linear.forward
    monkeypatch.setattr(
        chainer.links.Linear, "forward", lambda *arguments: -2 * linear(*arguments)
    )
    assert probes.chainer_computes() == [
        "the forward pass of a Linear link",
        "the backward pass of a Linear link",
    ]


@pytest.mark.mpi(1, 2)
def test_communicators_compute_exact_means() -> None:
    results = probes.communicators()
    if WORLD.rank:
        assert results is None
        return
    assert results is not None
    assert {"naive", "flat", "hierarchical", "two_dimensional", "single_node"} <= set(results)
    assert {name: wrong for name, wrong in results.items() if wrong} == {}
    assert not {"pure_nccl", "dummy"} & set(results)


@pytest.mark.parametrize(
    ("hosts", "left_out"),
    [("aa", set()), ("ab", {"single_node"}), ("aab", {"single_node", "two_dimensional"})],
)
def test_communicators_that_do_not_fit_the_hosts_are_left_out(
    hosts: str, left_out: set[str]
) -> None:
    everywhere: Any = SimpleNamespace(rank=0, allgather=lambda _: list(hosts))
    found = probes.usable(everywhere)
    assert set(registered()) - set(found) == {"pure_nccl", "dummy"} | left_out


@pytest.mark.mpi(2)
def test_communicator_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    create = chainermn.create_communicator

    def create_or_fail(name: str, **options: Any) -> Any:
        if name == "flat":
            raise RuntimeError("no flat now")
        return create(name, **options)

    probes.communicator.cache_clear()

    monkeypatch.setattr(chainermn, "create_communicator", create_or_fail)
    results = probes.communicators()
    assert results is None or results["flat"] == "RuntimeError: no flat now"


class FakeDriver:
    """A stand-in for ``libcuda.so.1``."""

    def __init__(self, code: int, names: list[str], capabilities: list[int]) -> None:
        self._names = names
        self._capabilities = capabilities
        self.cuInit = lambda flags: code

    def cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 13020

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self._names)

    def cuDeviceGetName(self, buffer: Any, length: int, number: int) -> None:
        assert length == len(buffer)
        buffer.value = self._names[number].encode()

    def cuDeviceGetAttribute(self, value: Any, attribute: int, number: int) -> None:
        value._obj.value = divmod(self._capabilities[number], 10)[attribute - 75]


@pytest.mark.parametrize(
    ("code", "error"),
    [(0, ""), (probes.NO_DEVICE, ""), (803, "cuInit fails with error 803")],
)
def test_cuda_driver(code: int, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, capabilities = ["B300", "V100"], [103, 70]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(code, gpus, capabilities))
    found = {"gpus": [], "capabilities": []}
    if code == 0:
        found = {"gpus": gpus, "capabilities": capabilities}
    assert probes.cuda() == {"cuda": "13.2", "error": error, **found}


# ---- asking ----


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (f"import os; os.kill(os.getpid(), {signal.SIGSEGV:d})", "crashed with SIGSEGV"),
        (
            "print('nonsense'); raise SystemExit('told\\n--')",
            "ended with exit code 1 and no answer: told",
        ),
        (
            "raise SystemExit('[proxy:1@b] connect (sock.c:1): unable to get host address for a\\n"
            "[proxy:1@b] main (pmip.c:2): unable to connect\\n[mpiexec@a] main: error waiting')",
            "ended with exit code 1 and no answer: b: unable to get host address for a",
        ),
        ("", "ended with exit code 0 and no answer"),
        (
            "print('chainermn-doctor-answer [1'); raise SystemExit(3)",
            "ended with exit code 3 and no answer",
        ),
    ],
)
def test_process_that_does_not_answer(code: str, failure: str) -> None:
    assert ask([sys.executable, "-c", code], ["it"], 60) == {"it": Outcome(failure=failure)}


ANSWERS = """\
import sys
for name in sys.argv[1:]:
    print(f'\\nchainermn-doctor-answer ["answer", "{name}", 7]', flush=True)
"""


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        ("raise SystemExit('told')", "ended with exit code 1 and no answer: told"),
        ("import os, signal; os.kill(os.getpid(), 11)", "crashed with SIGSEGV"),
        ("""print('chainermn-doctor-answer ["error", "b", "wrong"]')""", "wrong"),
    ],
)
def test_probes_before_the_one_that_fails_have_answered(end: str, failure: str) -> None:
    command = [sys.executable, "-c", ANSWERS + end, "a"]
    failed = Outcome(failure=failure)
    assert ask(command, ["a", "b", "c"], 60) == {"a": Outcome(7), "b": failed, "c": failed}


def test_probe_that_hangs_after_another() -> None:
    answers = """echo 'chainermn-doctor-answer ["answer", "a", 7]'; sleep 600"""
    hangs = Outcome(failure="no answer within 1 s")
    assert ask(["sh", "-c", answers], ["a", "b"], 1) == {"a": Outcome(7), "b": hangs}


def test_last_answer_of_a_job_that_ends_badly_is_not_relied_on() -> None:
    command = [sys.executable, "-c", ANSWERS + "raise SystemExit(3)", "a", "b"]
    failed = Outcome(7, "ended with exit code 3 and no answer")
    assert ask(command, ["a", "b"], 60) == {"a": Outcome(7), "b": failed}


ASK = """\
from chainermn.doctor import probe, probes
probes.slack = lambda: int(open("/proc/self/timerslack_ns").read())
probe._run_here("slack", "60")
"""


# Rank 0 answers while rank 1 has ended or is ending.
LEAVE = """\
import time
from chainermn.doctor import probe, probes

def leave():
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.rank
    MPI.Finalize()
    if rank == 0:
        time.sleep(0.5)
        return "still here"

probes.leave = leave
probe._run_here("leave", "60")
"""


@pytest.mark.each_mpi
def test_rank_that_ends_first_does_not_end_the_others() -> None:
    answers = ask(mpiexec_command(2, ["-c", LEAVE]), ["leave"], 60, launch_environment())
    assert answers == {"leave": Outcome("still here")}


@pytest.mark.parametrize(("turns", "slack"), [({}, 50_000), (TAKING_TURNS, 1_000_000)])
def test_process_that_takes_turns_sleeps_longer(turns: dict[str, str], slack: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in TAKING_TURNS}
    answers = ask([sys.executable, "-c", ASK], ["slack"], 60, {**environment, **turns})
    assert answers == {"slack": Outcome(slack)}


@pytest.mark.mpi(3)
def test_speeds_of_each_rank(steady_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: f"host{WORLD.rank}")
    speeds = probes.speeds()
    if WORLD.rank:
        assert speeds is None
        return
    assert speeds == {"computing": [1.0] * 3, "1 MiB to another host and back": [1.0] * 3}


@pytest.mark.mpi(3)
def test_speeds_of_two_hosts(steady_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: f"host{WORLD.rank // 2}")
    speeds = probes.speeds()
    if WORLD.rank == 0:
        assert speeds is not None
        assert speeds["1 MiB to another host and back"] == [1.0, 0.0, 1.0]
