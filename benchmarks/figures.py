"""Figures in docs/results/raw: what `python -m benchmarks` saves and the documentation quotes."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs/results"


@dataclass
class Measured:
    """All turns of a contestant, or the reason why there are none.

    Attributes
    ----------
    name : str
    seconds : list of float
        One for each turn.
    more : dict
        Other figures, by the heads of their columns.
    curves : list of list of float
        For each turn, what was found after each epoch.
    spans : list of list
        For each rank, what it did in the median turn, with its begin and end in seconds.
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
    """Contestants that were measured in turn: one table.

    Attributes
    ----------
    title : str
        What was measured, and where.
    key : dict
        The same for programs. A new measurement replaces an older one with the same key.
    rows : list of Measured
    baseline : str
        Name of the contestant that all are compared with.
    reference : float, optional
        Seconds to compare with that no contestant took.
    reference_is : str
        What would take that long.
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
        """Return a contestant; an empty one if there is none of this name."""
        return next((row for row in self.rows if row.name == name), Measured(name))

    def ratio(self, name: str, other: str) -> float | None:
        """Return how much longer one takes than another: the median of the rounds' ratios."""
        mine, others = self.row(name).seconds, self.row(other).seconds
        if not mine or not others:
            return None
        return statistics.median(a / b for a, b in zip(mine, others, strict=True))


def load(part: str) -> dict[str, dict[str, Any]]:
    """Return what was saved of a part, by MPI; ``groups`` are `Group` again."""
    found = {}
    for path in sorted((RESULTS / "raw").glob(f"{part}-*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        content["groups"] = [
            Group(**{**group, "rows": [Measured(**row) for row in group["rows"]]})
            for group in content["groups"]
        ]
        found[path.stem.removeprefix(f"{part}-")] = content
    return found


def milliseconds(seconds: float) -> str:
    """Return milliseconds with about three digits."""
    value = 1e3 * seconds
    if value < 0.1:
        return f"{value:.3f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
