"""Strangers that connect to the watch, both while it listens and while the job trains."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from chainermn.testing.mpiexec import Job, run_job
from libs.chainermn.tests.connections.strangers import visit

T = TypeVar("T")

pytestmark = pytest.mark.each_mpi

TIMEOUT = 120.0
SCRIPT = Path(__file__).with_name("held_back.py")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    running = Job(2, [SCRIPT, "at the start", tmp_path])
    yield running
    if running.process.poll() is None:
        running.kill()


def monitor_of(job: Job) -> psutil.Process | None:
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("chainermn-monit"):
                return process
    return None


def where_it_listens(monitor: psutil.Process) -> list[tuple[str, int]]:
    sockets = monitor.net_connections("tcp")
    return [(*it.laddr,) for it in sockets if it.status == psutil.CONN_LISTEN]


def until(is_true: Callable[[], T], job: Job) -> T:
    deadline = time.monotonic() + TIMEOUT
    while not (found := is_true()):
        assert job.process.poll() is None, job.wait(TIMEOUT)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


# Connections while the watch listens, and as many again once the job trains.
@pytest.mark.parametrize("visits", [500, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_job_among_strangers(visits: int, job: Job, tmp_path: Path) -> None:
    monitor = until(lambda: monitor_of(job), job)
    assert monitor is not None
    (place,) = until(lambda: where_it_listens(monitor), job)
    assert place[0] == "127.0.0.1"
    assert visit(place, visits) == 0
    (tmp_path / "come").touch()
    until(lambda: (tmp_path / "all").exists(), job)
    until(lambda: not where_it_listens(monitor), job)
    visit(place, visits)  # refused, unless another process has taken that port by now
    assert where_it_listens(monitor) == []
    (tmp_path / "over").touch()
    job.wait(TIMEOUT).check()


def test_rank_that_comes_once_the_watch_has_stopped_listening_is_watched(tmp_path: Path) -> None:
    result = run_job(3, [SCRIPT, "with a part", tmp_path], timeout=TIMEOUT).check(fails=True)
    assert f"rank 2 on {socket.gethostname()} (process " in result.stderr
    assert " disappeared first, without a message" in result.stderr


def test_nobody_can_connect_although_a_rank_cannot_join(tmp_path: Path) -> None:
    result = run_job(2, [SCRIPT, "never", tmp_path], timeout=TIMEOUT).check(warns=True)
    assert "ranks 1 cannot connect to rank 0 by TCP on any port" in result.stderr
    assert "docker run --network=host" in result.stderr
