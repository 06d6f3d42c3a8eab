"""Figures of the benchmarks, for pages beside those that ``nox -s benchmarks`` writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

RAW = Path(__file__).parent / "results/raw"
_MPI = {"mpich": "MPICH", "openmpi": "Open MPI"}
_COMMUNICATORS = ("naive", "flat", "hierarchical", "two_dimensional", "single_node")
#: Of each subject: where the groups of a table were measured, and its columns with their rows.
_TABLES = {
    "exchange": (
        ("2 ranks, one host", "two hosts"),
        {f"`{name}`": f"ours {name}" for name in _COMMUNICATORS},
    ),
    "iterations": (
        ("two hosts",),
        {
            "default": "ours",
            "`overlap=False`": "ours, overlap off",
            "bfloat16": "ours, bfloat16",
            "float16": "ours, float16",
            "double buffering": "ours, double buffering",
            "no exchange": "ours, no exchange",
        },
    ),
}


def files() -> list[Path]:
    """Return what figures and tables are made of."""
    return sorted(RAW.glob("*.json"))


def figure(name: str) -> str:
    """Return a figure in words, or from the least to the greatest where several have the name.

    Parameters
    ----------
    name : str
        ``SUBJECT: WHERE: ROW`` is a time, and ``SUBJECT: WHERE: ROW / OTHER ROW`` the ratio of
        two. The subject is the name of files in ``results/raw``, of one MPI or of both, and
        each of any number of parts ``WHERE:`` stands in the titles of the tables that are meant.

    Raises
    ------
    ValueError
        If nothing of this name has been measured.
    """
    subject, *where, rows = name.split(": ")
    groups = [
        group
        for path in files()
        if path.stem == subject or path.stem.rpartition("-")[0] == subject
        for group in json.loads(path.read_text(encoding="utf-8"))["groups"]
        if all(part in group["title"] for part in where)
    ]
    if not groups:
        raise ValueError(f"docs/results/raw has no table {': '.join([subject, *where])!r}")
    turns = [[_seconds(group, row) for row in rows.split(" / ")] for group in groups]
    if " / " not in rows:
        return f"{_range((statistics.median(seconds) for (seconds,) in turns), _milliseconds)} ms"
    ratios = [[a / b for a, b in zip(*both, strict=True)] for both in turns]
    return _range((statistics.median(ratio) for ratio in ratios), "{:.2f}".format)


def table(subject: str) -> Iterator[str]:
    """Yield the lines of a table in Markdown for each MPI, in milliseconds."""
    where, columns = _TABLES[subject]
    for path in sorted(RAW.glob(f"{subject}-*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        yield f"| ms, {_MPI[path.stem.partition('-')[2]]} | {' | '.join(columns)} |"
        yield f"|---|{'---:|' * len(columns)}"
        for group in content["groups"]:
            if any(part in group["title"] for part in where):
                rows = {row["name"]: row["seconds"] for row in group["rows"]}
                cells = [_cell(rows, name) for name in columns.values()]
                yield f"| {group['title']} | {' | '.join(cells)} |"
        yield ""
        yield f"Medians, {content['about']['date']}: {content['about']['machine']}."
        yield ""


def _seconds(group: dict[str, Any], name: str) -> list[float]:
    for row in group["rows"]:
        if row["name"] == name and row["seconds"]:
            return list(row["seconds"])
    raise ValueError(f"{name!r} has not been measured with {group['title']!r}")


def _range(values: Iterable[float], write: Callable[[float], str]) -> str:
    ordered = sorted(values)
    return " to ".join(dict.fromkeys([write(ordered[0]), write(ordered[-1])]))


def _cell(rows: dict[str, list[float]], name: str) -> str:
    if name not in rows:
        return ""
    return _milliseconds(statistics.median(rows[name])) if rows[name] else "refuses"


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
