"""The tests' own jobs: their processes are known on every host."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from chainermn.testing.mpiexec import JobResult
from ci.multinode import jobs
from ci.multinode.hosts import Hosts
from ci.multinode.jobs import Job

SCRIPT = Path(__file__).resolve().parent / "scripts/sleep_long.py"


def test_ranks_on_all_hosts_are_known_and_sent_signals(
    start_job: Callable[..., Job], hosts: Hosts
) -> None:
    job = start_job((2, 1), [SCRIPT])
    job.wait_for("all ranks sleep")
    found = {
        (process.rank, process.host) for process in job.processes() if process.rank is not None
    }
    assert found == {(0, hosts.names[0]), (1, hosts.names[0]), (2, hosts.names[1])}
    killed = job.signal_rank(2, signal.SIGKILL)
    assert (killed.rank, killed.host) == (2, hosts.names[1])
    ended = job.wait(60)
    assert ended.returncode != 0
    assert (ended.timed_out, ended.left_behind) == (False, []), ended


def test_what_is_left_on_another_host_is_found_and_killed(
    run_job: Callable[..., JobResult], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_GRACE", 0.5)
    job = run_job((1, 1), [SCRIPT, "stray"])
    assert not job.timed_out
    (stray,) = job.left_behind
    name, pid, *command = stray.split()
    assert (name, command) == (hosts.names[1], ["sleep", "86400"])
    assert hosts.run(name, ["test", "-d", f"/proc/{pid}"]).returncode == 1


def test_job_that_does_not_end_is_ended(run_job: Callable[..., JobResult]) -> None:
    job = run_job((1, 1), [SCRIPT], timeout=3)
    assert job.timed_out
    assert job.left_behind == []
