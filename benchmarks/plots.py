"""Plots that can be read on a phone and on a desk, on light and on dark pages.

A plot is one SVG file. Its background is transparent. Its text and lines are dark, or light if the
page around it is dark (`prefers-color-scheme`). Its bars stand out from white and from black.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from benchmarks import figures
from benchmarks.figures import Group, Measured, milliseconds

#: In points. A phone shows a plot 360 pixels wide, and 8 points are then 10 pixels.
WIDTH, SMALL, LARGE = 288, 8, 9
#: Scale of a plot on a wide page.
ON_A_DESK = 1.25
#: Color of text and lines while drawing. The file has ``currentColor`` instead.
INK = "#123456"
#: The opacity of lines that help to read.
FAINT = 0.25

# From the palette of Okabe and Ito, which color-blind people can tell apart.
OURS, PYTORCH, MPI, ORIGINAL = "#0072b2", "#d55e00", "#009e73", "#8a8a8a"

_STYLE = "svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#d1d7e0}}"
#: The height of a bar.
BAR = 13
_GAP, _MARGIN = 3, 4
_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": SMALL,
    "text.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "plots",  # makes files reproducible
}


@dataclass(frozen=True)
class Bar:
    """A value with its label.

    Attributes
    ----------
    label : str
    value : float
    color : str
    ends : tuple of float, optional
        Least and greatest value.
    outlined : float
        Part of the value that is outlined instead of filled.
    text : str
        Text after the bar.
    """

    label: str
    value: float
    color: str
    text: str
    ends: tuple[float, float] | None = None
    outlined: float = 0.0


@dataclass(frozen=True)
class Panel:
    """Bars that share a scale.

    Attributes
    ----------
    title : str
    bars : sequence of Bar
    reference : float, optional
        Position of a dashed line.
    """

    title: str
    bars: Sequence[Bar]
    reference: float | None = None


def color_of(name: str) -> str:
    """Return the color of a contestant, the same in all plots."""
    teams = {"ours": OURS, "Chainer": OURS, "PyTorch": PYTORCH, "original": ORIGINAL}
    return next((color for team, color in teams.items() if name.startswith(team)), MPI)


def times(
    group: Group, rows: Mapping[str, str], outlined: Mapping[str, str] | None = None
) -> list[Bar]:
    """Return bars of medians in milliseconds, with the fastest and the slowest turn.

    Parameters
    ----------
    group : Group
    rows : mapping
        Labels, and their rows. Rows that were not measured have no bar.
    outlined : mapping, optional
        Labels, and the rows whose times are outlined in their bars.
    """
    bars = []
    for label, name in rows.items():
        row = group.row(name)
        if not row.seconds:
            continue
        part = group.row((outlined or {}).get(label, ""))
        inside = 1e3 * min(part.median, row.median) if part.seconds else 0.0
        bars.append(bar_of(label, row, milliseconds(row.median), outlined=inside))
    return bars


def bar_of(
    label: str, row: Measured, text: str, *, scale: float = 1e3, outlined: float = 0.0
) -> Bar:
    """Return the bar of a row: its median, its fastest and its slowest turn, by default in ms."""
    ends = scale * min(row.seconds), scale * max(row.seconds)
    return Bar(label, scale * row.median, color_of(row.name), text, ends, outlined)


def panel(title: str, bars: Sequence[Bar], reference: float | None = None) -> list[Panel]:
    """Return a panel with a reference in seconds, or nothing if there are no bars."""
    return [Panel(title, bars, None if reference is None else 1e3 * reference)] if bars else []


def draw(name: str, panels: Sequence[Panel], caption: str, *, one_scale: bool = True) -> None:
    """Draw panels below each other into ``docs/results/NAME.svg``, if there are any.

    Parameters
    ----------
    name : str
    panels : sequence of Panel
    caption : str
        Unit, which way is better, and meaning of lines. It may have several lines.
    one_scale : bool
        Whether all panels have the same scale.
    """
    if not panels:
        return
    with settings():
        labels = [bar.label for panel in panels for bar in panel.bars]
        figure, axes = stack([BAR * len(panel.bars) for panel in panels], labels, caption)
        points = axes[0].get_position().width * WIDTH
        most = [_right_end(panel, points) for panel in panels]
        for axis, panel, right in zip(axes, panels, most, strict=True):
            _draw_panel(axis, panel, max(most) if one_scale else right)
            title_of(axis, panel.title)
        save(figure, name)


def settings() -> AbstractContextManager[None]:
    """Return a context for making and saving figures."""
    return matplotlib.rc_context(_SETTINGS)


def stack(
    heights: Sequence[float], labels: Iterable[str], caption: str, *, ticks: bool = False
) -> tuple[Figure, list[Any]]:
    """Return a figure with axes of these heights below each other.

    Parameters
    ----------
    heights : sequence of float
        In points.
    labels : iterable of str
        All texts left of the axes.
    caption : str
        Lines below the axes.
    ticks : bool
        Whether to leave room for numbers below the axes.
    """
    title, line = 2 * LARGE, SMALL + 4
    below = 2 * _GAP + (SMALL + _GAP) * ticks
    lines = caption.splitlines()
    height = sum(heights) + len(heights) * (title + below) + line * len(lines) + _MARGIN
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    left = _MARGIN + max(map(width_of, labels)) + 2 * _GAP
    axes, top = [], height
    for axis_height in heights:
        top -= title + axis_height
        place = (left, top, WIDTH - left - _MARGIN, axis_height)
        axis = figure.add_axes(
            tuple(a / b for a, b in zip(place, (WIDTH, height) * 2, strict=True))  # type: ignore[arg-type]
        )
        axis.spines[:].set_visible(False)
        axis.set_facecolor("none")
        axis.tick_params("y", length=0, labelcolor=INK, pad=2 * _GAP)
        axis.tick_params("x", length=0, labelcolor=INK, pad=_GAP)
        axes.append(axis)
        top -= below
    for number, text in enumerate(reversed(lines)):
        y = (_MARGIN + number * line) / height
        figure.text(_MARGIN / WIDTH, y, text, fontsize=SMALL, color=INK)
    return figure, axes


def width_of(text: str) -> float:
    """Return the width of a text in points."""
    return float(TextPath((0, 0), text, size=SMALL).get_extents().x1)


def title_of(axis: Any, text: str) -> None:
    """Write the title of a panel at the left end of the figure."""
    where = axis.get_position()
    figure = axis.figure
    y = where.y1 + _GAP / 72 / figure.get_figheight()
    figure.text(_MARGIN / WIDTH, y, text, fontsize=LARGE, fontweight="bold", color=INK)


def _draw_panel(axis: Any, shown: Panel, right: float) -> None:
    points = axis.get_position().width * WIDTH
    for y, bar in enumerate(shown.bars):
        axis.barh(y, bar.value - bar.outlined, left=bar.outlined, height=0.7, color=bar.color)
        if bar.outlined:
            axis.barh(y, bar.outlined, height=0.7, color="none", edgecolor=bar.color)
        end = bar.value
        if bar.ends:
            axis.plot(bar.ends, (y, y), color=INK, linewidth=0.8)
            end = max(bar.ends)
        if shown.reference and end < shown.reference < end + right * width_of(bar.text) / points:
            end = shown.reference  # so that the line does not cross the text
        axis.annotate(
            bar.text, (end, y), (_GAP, 0), textcoords="offset points", va="center_baseline"
        )
    axis.set_xlim(0, right)
    if shown.reference is not None:
        axis.axvline(shown.reference, color=INK, linestyle=(0, (3, 2)), linewidth=0.8)
    axis.set_ylim(len(shown.bars) - 0.5, -0.5)
    axis.set_xticks([])
    axis.set_yticks(range(len(shown.bars)), [bar.label for bar in shown.bars])
    axis.axvline(0, color=INK, linewidth=0.8)


def _right_end(shown: Panel, points: float) -> float:
    """Return the end of the scale, which leaves room for the texts after the bars."""
    ends = [(max(bar.ends or (bar.value,)), width_of(bar.text)) for bar in shown.bars]
    with_texts = (end / (1 - (text + 2 * _GAP) / points) for end, text in ends)
    return max(*with_texts, 1.02 * (shown.reference or 0.0))


def save(figure: Figure, name: str) -> None:
    """Write ``docs/results/NAME.svg`` for light and dark pages."""
    written = io.StringIO()
    nothing = {"Creator": None, "Date": None, "Format": None, "Type": None}
    figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    text = written.getvalue().replace(INK, "currentColor").replace("</style>", f"{_STYLE}</style>")
    for inches in figure.get_size_inches():
        text = text.replace(f'="{72 * inches:g}pt"', f'="{72 * inches * ON_A_DESK:g}pt"', 1)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    path = figures.RESULTS / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
