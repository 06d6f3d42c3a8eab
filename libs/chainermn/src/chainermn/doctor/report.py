"""Print the doctor's findings."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chainermn.doctor import host_facts
from chainermn.doctor.registry import Check, Finding, Status
from chainermn.launch.mpiexec import mpi4py_library
from chainermn.version import VERSION

Row: TypeAlias = tuple[Check, Finding]

_STYLES = {Status.GOOD: "green", Status.BAD: "red", Status.NOT_TRIED: "dim"}
_MARKS, _ARROW = dict(zip(Status, "✓✗–", strict=True)), "→"  # noqa: RUF001
_ASCII_MARKS, _ASCII_ARROW = dict(zip(Status, "+x-", strict=True)), "->"
_NAME_WIDTH = 26
_INDENT = " " * (1 + 1 + _NAME_WIDTH + 1)
# A terminal knows its width, but a pipe may default to one that breaks every line.
_NARROWEST = 100


def versions() -> dict[str, str]:
    """Return the versions that a bug report needs, without importing anything that may fail."""
    try:
        mpi = mpi4py_library()
    except RuntimeError as error:
        mpi = str(error)
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "Python": f"{platform.python_version()} ({sys.executable})",
        **host_facts.packages(),
        "chainermn": f"{VERSION} ({Path(__file__).parents[1]})",
        "MPI": mpi,
    }


def as_json(versions: Mapping[str, str], rows: Iterable[Row]) -> str:
    """Return versions and findings as JSON."""
    checks = [
        {"subject": check.subject, "name": check.name, **dataclasses.asdict(finding)}
        for check, finding in rows
    ]
    return json.dumps({"versions": dict(versions), "checks": checks}, indent=2, ensure_ascii=False)


def show(versions: Mapping[str, str], rows: Iterable[Row]) -> list[Row]:
    """Print versions and findings, subject by subject; return all rows."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST)
    is_ascii = console.options.ascii_only
    marks, arrow = (_ASCII_MARKS, _ASCII_ARROW) if is_ascii else (_MARKS, _ARROW)
    for name, value in versions.items():
        console.print(_line("", name, Text(value)))
    shown: list[Row] = []
    for subject, of_subject in groupby(rows, key=lambda row: row[0].subject):
        group = list(of_subject)
        console.print(f"\n[bold]{subject}[/bold]")
        # Checks that need the same failed check share a line.
        for (status, found), same in groupby(group, key=lambda row: (row[1].status, row[1].found)):
            checks, (finding, *_) = zip(*same, strict=True)
            name, text = checks[0].name, Text(found)
            if len(checks) > 1:
                name = f"{len(checks)} more"
                text.append(f" ({', '.join(each.name for each in checks)})")
            if finding.remedy:
                text.append(f"\n{arrow} {finding.remedy}", style="bold")
            console.print(_line(Text(marks[status], _STYLES[status]), name, text))
            if finding.command:  # on one line, however long, so that it can be copied
                console.print(Text(f"{_INDENT}$ {finding.command}", "bold"), soft_wrap=True)
        shown += group
    statuses = [finding.status for _, finding in shown]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in Status)
    console.print(f"\n{counts}")
    return shown


def _line(mark: str | Text, name: str, text: Text) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=_NAME_WIDTH)
    table.add_row(mark, name, text)
    return table
