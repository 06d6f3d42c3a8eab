"""Ranks that are killed while they begin to share memory leave none of it behind."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.multinode.hosts import Hosts
from ci.multinode.jobs import Job

SCRIPT = Path(__file__).with_name("scripts") / "die_while_sharing.py"
# Files that the MPIs themselves leave behind if ranks are killed.
OF_MPI = re.compile(r"mpich_shm_.*|sm_segment\..*|vader_segment\..*|ompi.*|prte.*|pmix.*")


@pytest.mark.parametrize("to_the_end", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_left(
    start_job: Callable[..., Job], hosts: Hosts, rank: int, to_the_end: bool
) -> None:
    if not hosts.emulated:
        pytest.skip("others may use the memory of real machines")
    for number in itertools.count(1) if to_the_end else (12,):
        job = start_job((2,), [SCRIPT, str(rank), str(number)]).wait()
        names = hosts.check(hosts.names[0], "ls", "-A", "/dev/shm").split()
        assert [name for name in names if not OF_MPI.fullmatch(name)] == []
        assert (job.timed_out, job.left_behind) == (False, [])
        if job.returncode == 0:
            break
    # A job succeeds only after others have been killed at every line.
    assert number > 10
    assert (job.returncode == 0) == to_the_end
