"""Draw where the time of all ranks goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from chainermn.files import atomic_write
from chainermn.profiling.timeline.summary import PARTS, Summary

# Work has strong colors, lost time pale ones.
_COLORS = {
    "data": "#e69f00",
    "compute": "#0072b2",
    "layers": "#cc79a7",
    "exchange": "#d55e00",
    "waiting": "#f3c9b3",
    "evaluation": "#009e73",
    "checkpoint": "#9467bd",
    "extensions": "#b5b5b5",
    "other": "#dcdcdc",
}
_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")
_LEAST_INCHES, _INCHES_PER_RANK = 2.2, 0.3


def check_picture(path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless `draw` can draw into a file of this name."""
    if Path(path).suffix not in _SUFFIXES:
        raise ValueError(f"the picture's name must end with {', '.join(_SUFFIXES)}, got {path}")


def draw(summary: Summary, path: str | os.PathLike[str], title: str) -> None:
    """Draw the parts of a mean iteration into a file, with one bar per rank.

    Raises ModuleNotFoundError if matplotlib is not installed, and ValueError as `check_picture`
    does.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    n_ranks = len(summary.ranks)
    height = _LEAST_INCHES + _INCHES_PER_RANK * n_ranks
    figure = Figure(figsize=(5.5, height), layout="constrained")
    axes: Any = figure.add_subplot()
    left = [0.0] * n_ranks
    for part in PARTS:
        widths = [1000 * rank.seconds[part] for rank in summary.ranks]
        axes.barh(range(n_ranks), widths, left=left, color=_COLORS[part], label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(n_ranks), [f"rank {rank}" for rank in range(n_ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("ms per iteration")
    axes.set_title(f"{title}: parallel efficiency {summary.efficiency:.0%}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)
