"""Let jobs fail, and print how each has ended: ``python -m benchmarks.failing [--hosts]``.

On one host, or with ``--hosts`` on two emulated ones, on the first of which this runs.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from typing import Any

from benchmarks.harness import REPOSITORY
from chainermn.testing.failures import (
    CASES,
    STALL_LIMIT,
    Case,
    Outcome,
    check,
    observe,
    wait_for,
)
from chainermn.testing.mpiexec import JOB_VARIABLE, Job, mpiexec_command
from ci.cluster import links
from ci.multinode import jobs
from ci.multinode.hosts import EMULATED_HOSTFILE, Hosts

SCRIPT = REPOSITORY / "libs/chainermn/tests/failures/fail.py"
LINK_DOWN = Case("link goes down", stall_limit=STALL_LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    hosts = Hosts(EMULATED_HOSTFILE) if arguments.hosts else None
    cases = CASES[:1] if arguments.quick else CASES
    found = {case.name: describe(case, fail(case, hosts), hosts) for case in cases}
    if hosts is not None and not arguments.quick:
        found[LINK_DOWN.name] = describe(LINK_DOWN, pull_plug(hosts), hosts)
    print(json.dumps(found))


def start(case: Case, hosts: Hosts | None) -> Job | jobs.Job:
    if hosts is None:
        return Job(2, [SCRIPT, case.name], env=case.environment)
    env = {"OMP_NUM_THREADS": "1", **case.environment}
    places = [(name, 1) for name in hosts.names[:2]]
    forward = [*env, JOB_VARIABLE]
    command = mpiexec_command(2, [SCRIPT, case.name], hosts=places, forward=forward)
    return jobs.Job(hosts, command, env=env)


def fail(case: Case, hosts: Hosts | None) -> Outcome:
    return observe(case, start(case, hosts))


def pull_plug(hosts: Hosts) -> Outcome:
    """Let the other host be unreachable, for as long as a job may take to end."""
    job = start(LINK_DOWN, hosts)
    wait_for(job, "failing", 1, 120)
    hosts.check(hosts.names[0], *links.set_link(hosts.names[1], "down"))
    begun = time.monotonic()
    job.process.wait(120)
    seconds = time.monotonic() - begun
    time.sleep(max(0.0, LINK_DOWN.bound - seconds))
    hosts.check(hosts.names[0], *links.set_link(hosts.names[1], "up"))
    return Outcome(seconds, job.wait(120))


def describe(case: Case, outcome: Outcome, hosts: Hosts | None) -> dict[str, Any]:
    names = hosts.names if hosts else [socket.gethostname()] * 2
    try:
        check(case, outcome, (names[0], names[1]))
        late = outcome.seconds > case.bound
        fault = f"took longer than {case.bound:g} s" if late else ""
    except AssertionError as error:
        fault = str(error)
    return {
        "seconds": outcome.seconds,
        "exit code": outcome.result.returncode,
        "processes left": len(outcome.result.left_behind),
        "fault": fault,
    }


if __name__ == "__main__":
    main()
