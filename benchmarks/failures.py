"""How failing jobs end: seconds, exit code, processes left behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from benchmarks.figures import Group, Measured, load
from benchmarks.harness import REPOSITORY, Settings, places
from chainermn.launch.mpiexec import NAMES
from chainermn.testing.mpiexec import JOB_VARIABLE, Job, mpiexec_command
from ci.cluster import links
from ci.multinode import jobs
from ci.multinode.hosts import EMULATED_HOSTFILE, Hosts
from libs.chainermn.tests.failures.cases import (
    CASES,
    SCRIPT,
    STALL_LIMIT,
    Case,
    Outcome,
    check,
    observe,
    wait_for,
)

LINK_DOWN = Case("link goes down", stall_limit=STALL_LIMIT)
FIGURES = ("exit code", "processes left")


def measure(settings: Settings) -> Iterator[Group | str]:
    """Let jobs fail. Yield groups, and for anything that could not be measured, the reason."""
    for place in places({"one host": (2,), "two hosts": (1, 1)}):
        if isinstance(place, str):
            yield place
            continue
        settings.tell(place.title)
        # The first emulated host starts the jobs.
        command = [sys.executable, "-m", "benchmarks.failures", *["--quick"] * settings.quick]
        if place.cluster is not None:
            command = place.cluster.hosts()[0].command(*command, "--hosts")
        ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if ended.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {ended.stderr[-3000:]}")
        rows = [Measured(**row) for row in json.loads(ended.stdout)]
        yield Group(place.title, {"hosts": place.title}, rows, rows[0].name)


def main() -> None:
    """Let jobs fail on this host or on the emulated hosts, and print rows as JSON."""
    hosts = Hosts(EMULATED_HOSTFILE) if "--hosts" in sys.argv else None
    is_quick = "--quick" in sys.argv
    cases = CASES[:1] if is_quick else CASES
    rows = [describe(case, observe(case, start(case, hosts)), hosts) for case in cases]
    if hosts is not None and not is_quick:
        rows.append(describe(LINK_DOWN, pull_plug(hosts), hosts))
    print(json.dumps(rows))


def start(case: Case, hosts: Hosts | None) -> Job | jobs.Job:
    if hosts is None:
        return Job(2, [SCRIPT, case.name], env=case.environment)
    env = {"OMP_NUM_THREADS": "1", **case.environment}
    on_each = [(name, 1) for name in hosts.names[:2]]
    forward = [*env, JOB_VARIABLE]
    command = mpiexec_command(2, [SCRIPT, case.name], hosts=on_each, forward=forward)
    return jobs.Job(hosts, command, env=env)


def pull_plug(hosts: Hosts) -> Outcome:
    """Make the other host unreachable for as long as a job may need to end."""
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
    """Return the row of a case. ``skipped`` says what is wrong with the outcome."""
    first, second = hosts.names[:2] if hosts else [socket.gethostname()] * 2
    fault = f"took longer than {case.bound:g} s" if outcome.seconds > case.bound else ""
    try:
        check(case, outcome, (first, second))
    except AssertionError as error:
        fault = str(error)
    figures = (outcome.result.returncode, len(outcome.result.left_behind))
    more = dict(zip(FIGURES, figures, strict=True))
    return {"name": case.name, "seconds": [outcome.seconds], "more": more, "skipped": fault}


def write(part: str) -> None:
    """Write one table of everything that has been saved."""
    saved = load(part)
    columns = {
        f"{NAMES[mpi]}, {group.title}": group
        for mpi, content in saved.items()
        for group in content["groups"]
    }
    names = dict.fromkeys(row.name for group in columns.values() for row in group.rows)
    lines = [
        "",
        "## Seconds; exit code; processes left",
        "",
        *report.heads_of(["rank 1", *columns]),
    ]
    for name in names:
        lines.append(report.line([name, *(_cell(group.row(name)) for group in columns.values())]))
    for mpi, content in saved.items():
        lines += ["", f"## {NAMES[mpi]}", "", *report.describe_run(content), ""]
        lines += [
            f"- **{group.title}, {row.name}**: {row.skipped.splitlines()[0]}"
            for group in content["groups"]
            for row in group.rows
            if row.skipped
        ]
    report.write_page(part, lines)


def _cell(row: Measured) -> str:
    if not row.seconds:
        return ""
    return "; ".join([f"{row.seconds[0]:.1f}", *(f"{row.more[figure]:.0f}" for figure in FIGURES)])


if __name__ == "__main__":
    main()
