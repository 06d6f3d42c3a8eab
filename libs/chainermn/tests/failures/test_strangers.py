"""Strangers connect to the watch, as long as it listens, and while the job trains."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from chainermn.testing.mpiexec import Job, run_job
from libs.chainermn.tests.failures.strangers import visit

pytestmark = pytest.mark.each_mpi

TIMEOUT = 120.0
SCRIPT = Path(__file__).with_name("held_back.py")
# Connections while the watch listens, and then.
VISITS = 100_000 if "CHAINERMN_LONG_TESTS" in os.environ else 500


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    running = Job(3, [SCRIPT, "at the start", tmp_path])
    yield running
    if running.process.poll() is None:
        running.kill()


def where_the_watch_listens(job: Job) -> list[tuple[str, int]]:
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("chainermn-monit"):
                sockets = process.net_connections("tcp")
                return [(*it.laddr,) for it in sockets if it.status == psutil.CONN_LISTEN]
    return []


def test_job_among_strangers(job: Job, tmp_path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not (found := where_the_watch_listens(job)):
        assert job.process.poll() is None, job.wait(TIMEOUT)
        assert time.monotonic() < deadline
    ((host, port),) = found
    assert host == "127.0.0.1"
    assert visit((host, port), VISITS) == 0
    (tmp_path / "come").touch()
    while not (tmp_path / "all").exists():
        assert job.process.poll() is None, job.wait(TIMEOUT)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while not visit((host, port), 1):
        assert time.monotonic() < deadline
    assert visit((host, port), VISITS) == VISITS
    (tmp_path / "over").touch()
    job.wait(TIMEOUT).check()


def test_rank_that_comes_once_the_watch_has_stopped_listening_is_watched(tmp_path: Path) -> None:
    result = run_job(3, [SCRIPT, "with a part", tmp_path], timeout=TIMEOUT).check(fails=True)
    assert f"rank 2 on {socket.gethostname()} (process " in result.stderr
    assert " is the first to be gone, without a word" in result.stderr


def test_nobody_can_connect_although_a_rank_cannot_join(tmp_path: Path) -> None:
    result = run_job(3, [SCRIPT, "never", tmp_path], timeout=TIMEOUT).check(warns=True)
    assert "ranks 2 cannot connect to rank 0 by TCP on any port" in result.stderr
