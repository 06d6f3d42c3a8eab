"""A job trains while strangers connect to the watch, as long as it listens and after that."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chainermn.testing.mpiexec import Job
from libs.chainermn.tests.failures.strangers import visit

TIMEOUT = 120.0
SCRIPT = Path(__file__).with_name("held_back.py")
# Connections while the watch listens, and then.
VISITS = 100_000 if "CHAINERMN_LONG_TESTS" in os.environ else 500


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    running = Job(3, [SCRIPT, tmp_path])
    yield running
    if running.process.poll() is None:
        running.kill()


def wait_for(file: Path, job: Job) -> None:
    """Wait until a job has written a file."""
    deadline = time.monotonic() + TIMEOUT
    while not file.exists():
        assert job.process.poll() is None, job.wait(TIMEOUT)
        assert time.monotonic() < deadline, f"no {file.name}"
        time.sleep(0.01)


@pytest.mark.each_mpi
def test_job_trains_among_strangers(job: Job, tmp_path: Path) -> None:
    wait_for(tmp_path / "port", job)
    address = ("127.0.0.1", int((tmp_path / "port").read_text()))
    assert visit(address, VISITS) == 0
    (tmp_path / "come").touch()
    wait_for(tmp_path / "all", job)
    assert visit(address, VISITS) == VISITS
    (tmp_path / "over").touch()
    job.wait(TIMEOUT).check()
