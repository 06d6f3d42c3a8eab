"""How jobs end when something fails: seconds, exit code, processes left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import report
from benchmarks.harness import REPOSITORY, Measured
from benchmarks.report import Group
from benchmarks.settings import Settings
from chainermn.testing.failures import BOUND, STALL_LIMIT
from ci.cluster import requirements
from ci.cluster.cluster import Cluster

TITLE = "Failures"
INTRODUCTION = f"""\
Two ranks, one of which fails while the other waits for it in an allreduce. In each cell: seconds
from the failure to the end of `mpiexec`; its exit code; how many processes were left on any host.
A job has to end in {BOUND:.0f} s; where nothing but silence is seen, as of a rank that is stopped
or a host that cannot be reached, in {BOUND:.0f} s after the stall limit (`CHAINERMN_STALL_LIMIT`,
here {STALL_LIMIT:.0f} s, by default 300 s). A negative exit code is a signal that ended `mpiexec`.
"SIGTERM" was sent to a rank, "SIGTERM to mpiexec" to `mpiexec`; "out of memory" takes as long as
filling the memory. On two hosts it is the rank on the other one that fails.
What each job wrote to standard error was checked too: what has failed, on which rank and host, and
which ranks had not come to the call in which the others waited.

A call that a script makes on `communicator.mpi_comm` itself is not seen: a rank that waits there
seems to compute. If another rank raises, crashes or falls silent the job ends all the same. But if
one has ended its script, or ranks wait for each other there, that is only warned of, after the
stall limit."""

ONE_HOST, TWO_HOSTS = "one host", "two hosts"


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Let jobs fail; return groups, and what could not be measured and why."""
    program = [sys.executable, "-m", "benchmarks.failing", *["--quick"] * settings.quick]
    settings.teller(TITLE)(ONE_HOST)
    groups = [run(ONE_HOST, program)]
    if reason := requirements.find_missing():
        return groups, [f"{TWO_HOSTS}: {reason}"]
    settings.teller(TITLE)(TWO_HOSTS)
    with Cluster(f"failures-{os.getpid()}") as cluster:
        cluster.up(2, ends_with_this_process=True)
        first = cluster.hosts()[0]
        groups.append(run(TWO_HOSTS, first.command(*program, "--hosts")))
    return groups, []


def run(title: str, command: Sequence[str]) -> Group:
    """Run `benchmarks.failing`; return what it found.

    Raises
    ------
    RuntimeError
        If it does not get to its end.
    """
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr[-3000:]}")
    found = json.loads(ended.stdout)
    rows = [
        Measured(
            name,
            [case["seconds"]],
            {key: case[key] for key in ("exit code", "processes left")},
            case["fault"],
        )
        for name, case in found.items()
    ]
    return Group(title, {"hosts": title}, rows, rows[0].name)


def write() -> None:
    """Write ``docs/results/failures.md`` from all that has been saved."""
    saved = report.load("failures")
    columns = {
        f"{report.NAMES[mpi]}, {group.title}": group
        for mpi, content in saved.items()
        for group in content["groups"]
    }
    names = list(dict.fromkeys(row.name for group in columns.values() for row in group.rows))
    lines = [f"# {TITLE}", "", INTRODUCTION, ""]
    lines += [f"| | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for name in names:
        cells = [_cell(group.row(name)) for group in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    for mpi, content in saved.items():
        lines += [f"## {report.NAMES[mpi]}", "", *report.describe(content["about"]), ""]
        faults = [
            f"- **{group.title}, {row.name}: not as it has to be**: {row.skipped.splitlines()[0]}"
            for group in content["groups"]
            for row in group.rows
            if row.skipped
        ]
        faults += [f"- Not measured: {reason}" for reason in content["skipped"]]
        lines += [*faults, ""] if faults else []
    (report.RESULTS / "failures.md").write_text("\n".join(lines).rstrip() + "\n")


def _cell(row: Measured) -> str:
    if not row.seconds:
        return ""
    code, left = row.more["exit code"], row.more["processes left"]
    return f"{row.seconds[0]:.1f} s; {code:.0f}; {left:.0f}"
