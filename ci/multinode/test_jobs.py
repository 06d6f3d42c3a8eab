"""The tests' own jobs: their processes are known on every host."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

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
    start_job: Callable[..., Job], hosts: Hosts
) -> None:
    job = start_job((1, 1), [SCRIPT, "stray"]).wait(grace=0.5)
    assert not job.timed_out
    # After only half a second, some of mpiexec's own processes may be left, too.
    (stray,) = (process for process in job.left_behind if process.endswith("sleep 86400"))
    name, pid, *_ = stray.split()
    assert name == hosts.names[1]
    assert hosts.run(name, ["test", "-d", f"/proc/{pid}"]).returncode == 1


def test_job_that_does_not_end_is_ended(start_job: Callable[..., Job]) -> None:
    job = start_job((1, 1), [SCRIPT])
    job.wait_for("all ranks sleep")
    assert job.wait(0.1).timed_out
    while job.processes():  # on both hosts
        time.sleep(0.1)
