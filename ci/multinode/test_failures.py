"""However a rank, a host or a link fails, the job ends by itself on all hosts, with a message."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chainermn.testing.failures import CASES, STALL_LIMIT, Case, Outcome, check, observe
from ci.multinode.hosts import Hosts
from ci.multinode.jobs import Job

SCRIPT = Path(__file__).resolve().parents[2] / "libs/chainermn/tests/failures/fail.py"
# Emulated hosts share their cores, and the machine may be busy with other things too.
SLACK = 3.0

LINK_DOWN = Case(
    "link goes down",
    ("{host}", "allreduce (call 2 on communicator 1 of ranks 0-1)"),
    stall_limit=STALL_LIMIT,
)


@pytest.mark.parametrize("rank", [1, 0], ids=["on the other host", "on the first host"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rank_fails(case: Case, rank: int, start_job: Callable[..., Job], hosts: Hosts) -> None:
    job = start_job((1, 1), [SCRIPT, case.name, str(rank)], env=case.environment)
    first, second = hosts.names[:2]
    check(case, observe(case, job), (first, second), rank=rank, slack=SLACK)


@pytest.mark.parametrize("end", [1, 0], ids=["of the other host", "of the first host"])
def test_link_goes_down(
    end: int, start_job: Callable[..., Job], set_link: Callable[[str, str], None], hosts: Hosts
) -> None:
    job = start_job((1, 1), [SCRIPT, "link goes down"], env=LINK_DOWN.environment)
    job.wait_for("failing")
    set_link(hosts.names[end], "down")
    start = time.monotonic()
    job.process.wait(SLACK * LINK_DOWN.bound)
    seconds = time.monotonic() - start
    # Nobody reaches the other host now, where all has to end in the same time.
    time.sleep(max(0.0, LINK_DOWN.bound - seconds))
    for name in hosts.names[:2]:
        set_link(name, "up")
    left = job.processes()
    outcome = Outcome(seconds, job.wait())
    assert not left, outcome
    check(LINK_DOWN, outcome, (hosts.names[0], hosts.names[1]), slack=SLACK)
