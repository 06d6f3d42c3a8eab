"""Figures in docs/results/raw, which `python -m benchmarks` saves and the documentation quotes."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs/results"
#: A quoted figure, if it has been written already, and the comment with its name; see `figure`.
QUOTE = re.compile(r"(?:\d[\d.]*(?: to \d[\d.]*)?(?: ms)?)?(<!-- measured: (.+?) -->)")


@dataclass
class Measured:
    """All turns of a contestant, or the reason why there are none.

    Attributes
    ----------
    name : str
    seconds : list of float
        Time of each turn.
    more : dict
        Other figures, by the heads of their columns.
    curves : list of list of float
        Accuracy after each epoch, for each turn.
    spans : list of list
        Computations of each rank in the median turn, with their begin and end in seconds.
    skipped : str
        Why the contestant could not run.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    more: dict[str, float] = field(default_factory=dict)
    curves: list[list[float]] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    skipped: str = ""

    @property
    def median(self) -> float:
        """Return the median of the turns, in seconds."""
        return statistics.median(self.seconds)

    @property
    def last(self) -> list[float]:
        """Return the ends of the curves."""
        return [curve[-1] for curve in self.curves]


@dataclass
class Group:
    """Contestants that took turns: one table.

    Attributes
    ----------
    title : str
        What was measured, and where.
    key : dict
        The same for programs. A new measurement replaces an older one with the same key.
    rows : list of Measured
    baseline : str
        Name of the contestant that all others are compared with.
    reference : float, optional
        Theoretical time in seconds to compare with.
    reference_is : str
        Description of the reference.
    notes : list of str
        Further lines below the table.
    """

    title: str
    key: dict[str, str]
    rows: list[Measured]
    baseline: str
    reference: float | None = None
    reference_is: str = ""
    notes: list[str] = field(default_factory=list)

    def row(self, name: str) -> Measured:
        """Return a contestant, or an empty one if the name is unknown."""
        return next((row for row in self.rows if row.name == name), Measured(name))

    def ratio(self, name: str, other: str) -> float | None:
        """Return the time of one relative to another: the median of the ratios of all rounds."""
        mine, others = self.row(name).seconds, self.row(other).seconds
        if not mine or not others:
            return None
        return statistics.median(a / b for a, b in zip(mine, others, strict=True))


def load(part: str) -> dict[str, dict[str, Any]]:
    """Return the saved figures of a part for each MPI, with ``groups`` as `Group` objects."""
    found = {}
    for path in sorted((RESULTS / "raw").glob(f"{part}-*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        content["groups"] = [
            Group(**{**group, "rows": [Measured(**row) for row in group["rows"]]})
            for group in content["groups"]
        ]
        found[path.stem.removeprefix(f"{part}-")] = content
    return found


def find(content: dict[str, Any], **key: str) -> Group:
    """Return the group with these items in its key, or an empty one."""
    found = (group for group in content["groups"] if key.items() <= group.key.items())
    return next(found, Group("", key, [], ""))


def milliseconds(seconds: float) -> str:
    """Return milliseconds with about three digits."""
    value = 1e3 * seconds
    if value < 0.1:
        return f"{value:.3f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def figure(name: str) -> str:
    """Return a figure as text, or the least and the greatest if several have the name.

    Parameters
    ----------
    name : str
        ``PART: WHERE: ROW`` is a time, and ``PART: WHERE: ROW / OTHER ROW`` the ratio of two. The
        part names files in ``results/raw``: those of both MPIs, or as ``PART-mpich`` that of one.
        ``WHERE:`` may be repeated, and selects the tables whose titles contain each of the texts.

    Raises
    ------
    ValueError
        If there is no such table or row.
    """
    part, *where, rows = name.split(": ")
    part, _, only = part.partition("-")
    groups = [
        group
        for mpi, content in load(part).items()
        for group in content["groups"]
        if only in ("", mpi) and all(text in group.title for text in where)
    ]
    if not groups:
        raise ValueError(f"docs/results/raw has no table {': '.join([part, *where])!r}")
    values = []
    for group in groups:
        value = _value(group, rows)
        if value is None:
            raise ValueError(f"{rows!r} has not been measured with {group.title!r}")
        values.append(value)
    is_ratio = " / " in rows
    ends = [f"{v:.2f}" if is_ratio else milliseconds(v) for v in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends)) + ("" if is_ratio else " ms")


def _value(group: Group, rows: str) -> float | None:
    name, _, other = rows.partition(" / ")
    if other:
        return group.ratio(name, other)
    return group.row(name).median if group.row(name).seconds else None
