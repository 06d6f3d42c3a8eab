"""What the guard beside a rank says and ends while a job starts. The ranks are no real ones."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from chainermn.failures import clock, ending, guard
from chainermn.failures.processes import Process

HOST = socket.gethostname()
VARIABLES = {
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}

Watch = Callable[..., None]


@pytest.fixture(params=VARIABLES)
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Return a function that runs the guard of a process, as if that were such a rank."""
    reapers: list[subprocess.Popen[bytes]] = []
    for name in [name for names in VARIABLES.values() for name in names]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(guard, "_PERIOD", 0.02)
    monkeypatch.setattr(guard, "_SECONDS_TO_BE_SURE", 0.1)
    monkeypatch.setattr(clock, "_SECONDS_FOR_EACH", 0.0)
    monkeypatch.setattr(ending, "_reapers", reapers)
    monkeypatch.setattr(ending, "_SECONDS_FOR_MPI", 0)

    def run(pid: int, numbers: tuple[int, int, int], limit: float = 0.0) -> None:
        for name, number in zip(VARIABLES[request.param], numbers, strict=True):
            monkeypatch.setenv(name, str(number))
        guard.main(pid, limit)
        for reaper in reapers:
            reaper.wait(60)

    return run


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that returns what has been written to standard error."""
    return lambda: capfd.readouterr().err


def wait_for_the_end_of(*processes: Process) -> None:
    """Wait until processes that have been killed are dead."""
    for process in processes:
        while process.is_alive():
            os.sched_yield()


def test_rank_of_this_host_has_ended(
    start_job: Any, watch: Watch, said: Callable[[], str]
) -> None:
    job = start_job(3)
    job.end(1)
    watch(job.ranks[2].pid, (2, 3, 3))
    assert (
        f"chainermn: rank 1 on {HOST} ended before create_communicator, in which "
        f"rank 2 on {HOST} waits."
    ) in said()
    wait_for_the_end_of(*job.ranks, job.launcher)


def test_rank_of_one_of_several_hosts_has_ended(
    start_job: Any, watch: Watch, said: Callable[[], str]
) -> None:
    job = start_job(2)
    job.end(0)
    watch(job.ranks[1].pid, (1, 6, 2))
    assert f"chainermn: of the 2 ranks on {HOST} all but [1] ended before" in said()
    wait_for_the_end_of(job.launcher)


def test_ranks_have_not_come_within_the_limit(
    start_job: Any, watch: Watch, said: Callable[[], str]
) -> None:
    job = start_job(2, "prterun")
    watch(job.ranks[0].pid, (0, 2, 2), limit=0.2)
    assert (
        f"rank 0 on {HOST} has waited for 0 s in create_communicator for ranks that have not "
        "called it. Running on this host: ranks [0, 1], of 2. CHAINERMN_STALL_LIMIT sets"
    ) in said()
    wait_for_the_end_of(*job.ranks, job.launcher)


def test_rank_that_nothing_of_mpi_has_started(watch: Watch, said: Callable[[], str]) -> None:
    with subprocess.Popen(["sleep", "600"]) as alone:
        watch(alone.pid, (0, 2, 2), limit=0.2)
    assert "Running on this host: ranks [], of 2." in said()


def test_rank_ends_by_itself(
    start_job: Any, watch: Watch, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(2)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 20:
            job.end(0)

    monkeypatch.setattr(guard.time, "sleep", sleep)
    watch(job.ranks[0].pid, (0, 2, 2))
    assert len(looks) == 20
    assert said() == ""
    assert job.ranks[1].is_alive()


def test_rank_is_ended_by_another_before_its_turn(
    start_job: Any, watch: Watch, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(3)
    job.end(0)
    monkeypatch.setattr(clock, "_SECONDS_FOR_EACH", 7.0)
    monkeypatch.setattr(guard.time, "sleep", lambda s: job.end(2) if s == 7 else None)
    watch(job.ranks[2].pid, (2, 3, 3))
    assert said() == ""
    assert job.ranks[1].is_alive()


def test_rank_has_ended_already(watch: Watch, said: Callable[[], str]) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    watch(ended.pid, (0, 2, 2))
    assert said() == ""
