"""What the doctor prints."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

import chainermn
from chainermn.doctor import host_facts
from chainermn.doctor.registry import Check, Finding, Status, not_tried
from chainermn.launch.mpiexec import mpi4py_library

Row: TypeAlias = tuple[Check, Finding]

_COLOURS = {Status.GOOD: "green", Status.BAD: "red", Status.NOT_TRIED: "dim"}
_WORDS = {Status.GOOD: "good", Status.BAD: "bad", Status.NOT_TRIED: "not tried"}
_NAME_WIDTH = 26
_INDENT = " " * (1 + 1 + _NAME_WIDTH + 1)
# In a narrower pipe every line would break; a terminal knows its width.
_NARROWEST = 100


def versions() -> dict[str, str]:
    """Return what a bug report needs to name, without importing anything that may fail."""
    try:
        mpi = mpi4py_library()
    except RuntimeError as error:
        mpi = str(error)
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "Python": f"{platform.python_version()} ({sys.executable})",
        **host_facts.packages(),
        "chainermn": f"{chainermn.__version__} ({os.path.dirname(chainermn.__file__ or '')})",
        "MPI": mpi,
    }


def as_json(versions: Mapping[str, str], rows: Iterable[Row]) -> str:
    """Return versions and findings for programs."""
    checks = [
        {
            "subject": check.subject,
            "name": check.name,
            "status": _WORDS[finding.status],
            "found": finding.found,
            "remedy": finding.remedy,
            "command": finding.command,
        }
        for check, finding in rows
    ]
    return json.dumps({"versions": dict(versions), "checks": checks}, indent=2, ensure_ascii=False)


def show(versions: Mapping[str, str], rows: Iterable[Row]) -> list[Row]:
    """Print versions and findings for people, subject by subject; return all rows."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST)
    facts = _table()
    for name, value in versions.items():
        facts.add_row("", name, Text(value))
    console.print(facts)
    shown: list[Row] = []
    for subject, of_subject in groupby(rows, key=lambda row: row[0].subject):
        group = list(of_subject)
        console.print(f"\n[bold]{subject}[/bold]")
        for name, finding in _merged(group):
            found = Text(finding.found)
            if finding.remedy:
                found.append(f"\n→ {finding.remedy}", style="bold")
            row = _table()
            row.add_row(Text(finding.status, style=_COLOURS[finding.status]), name, found)
            console.print(row)
            if finding.command:  # on one line, however long: it is there to be copied
                console.print(Text(f"{_INDENT}$ {finding.command}", "bold"), soft_wrap=True)
        shown += group
    statuses = [finding.status for _, finding in shown]
    counts = ", ".join(f"{statuses.count(status)} {_WORDS[status]}" for status in Status)
    console.print(f"\n{counts}")
    return shown


def _table() -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=_NAME_WIDTH)
    table.add_column()
    return table


def _merged(rows: Iterable[Row]) -> Iterable[tuple[str, Finding]]:
    """Yield names and findings; checks that need the same one become one row."""
    for (_, found), same in groupby(rows, key=lambda row: (row[1].status, row[1].found)):
        checks, findings = zip(*same, strict=True)
        if len(checks) == 1:
            yield checks[0].name, findings[0]
        else:
            names = ", ".join(check.name for check in checks)
            yield f"{len(checks)} more", not_tried(f"{found} ({names})")
