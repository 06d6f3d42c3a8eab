"""The cost of the watch over failures: in an iteration, and of the monitor of many ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import overhead, report
from benchmarks.figures import Group, Measured
from benchmarks.harness import REPOSITORY, Contestant, Settings
from benchmarks.simulated_ranks import STALL_LIMIT, WRONG

OFF = "ours, not watched"
MONITOR = "The monitor, until it says what is wrong; simulated ranks"
SIZES = (8, 64, 512)


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups."""
    yield from overhead.measure(settings, _contestants, OFF)
    if settings.wants(MONITOR):
        yield _measure_monitor(settings)


def _contestants(network: str, batchsize: int) -> list[Contestant]:
    options = {"what": "iteration", "communicator": "naive"}
    return [
        Contestant(name, team, {**options, "network": network, "batchsize": batchsize})
        for name, team in ((OFF, "not watched"), ("ours", "ours"))
    ]


def _measure_monitor(settings: Settings) -> Group:
    """Let monitors of several sizes run for minutes."""
    seconds = 1 if settings.quick else 180
    rows = []
    for size in SIZES[:1] if settings.quick else SIZES:
        settings.tell(f"{MONITOR}: {size}")
        command = [sys.executable, "-m", "benchmarks.simulated_ranks", str(size)]
        ended = subprocess.run(
            [*command, "--seconds", str(seconds)], cwd=REPOSITORY, capture_output=True, text=True
        )
        if ended.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {ended.stderr[-3000:]}")
        found = json.loads(ended.stdout)
        noticed = [found[name] for name in WRONG]
        rows.append(Measured(f"{size} ranks", seconds=noticed, more=found))
    notes = [
        f"The processor time is averaged over {seconds} s in which all is well.",
        "Each rank reports that it waits in the next all-reduce.",
        "Seconds are the time until the monitor prints what is wrong. For silence and a deadlock, "
        f"they start at the stall limit, here {STALL_LIMIT:g} s.",
    ]
    return Group(MONITOR, {"ranks": "simulated"}, rows, rows[0].name, notes=notes)


def write(part: str) -> None:
    """Write the page."""
    report.write(part, _table)


def _table(group: Group) -> list[str]:
    if group.title != MONITOR:
        return report.table(group)
    columns = list(group.rows[0].more)
    lines = report.heads_of(["job", *columns])
    for row in group.rows:
        lines.append(report.line([row.name, *(f"{row.more[column]:.2f}" for column in columns)]))
    return [*lines, "", *(f"- {note}" for note in group.notes)]
