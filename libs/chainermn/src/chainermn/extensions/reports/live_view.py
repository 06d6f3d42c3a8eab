"""The live view of a training in a terminal: rows of the log, progress bars and speed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

EFFICIENCY, SLOWEST = "parallel efficiency", "slowest rank"
_NUMBER = 10  # characters of a column at least
_GAP = 2  # between columns
_LINES = 13  # lines of the view around the rows
_WIDTH = 100  # width of the bars, at most


@dataclass
class State:
    """The state of a training.

    Attributes
    ----------
    log : sequence of dict
        Entries of the log so far.
    latest : dict of float
        Values observed in the last iteration, and ``iteration``, ``epoch`` (with a fraction) and
        ``elapsed_time`` (in seconds).
    speed : dict of float
        Values such as ``images/s``.
    done : float or None
        Fraction of the training that is done, from 0 to 1; None if its length is unknown.
    minutes_left : float or None
        Estimated minutes until the end; None if unknown.
    """

    log: Sequence[Mapping[str, float]]
    latest: Mapping[str, float]
    speed: Mapping[str, float]
    done: float | None = None
    minutes_left: float | None = None


def view(columns: Sequence[str], state: State, width: int, height: int) -> RenderableType:
    """Return the last rows that fit, a row for the last iteration, and the progress.

    Parameters
    ----------
    columns : sequence of str
        Entries of the log. If the terminal is too narrow, those on the right are left out.
    state : State
        State of the training.
    width, height : int
        Size of the terminal in columns and lines.
    """
    log = state.log[-max(1, height - _LINES) :]
    is_between = not log or log[-1].get("iteration") != state.latest["iteration"]
    left = {} if state.minutes_left is None else {"minutes left": state.minutes_left}
    current = {**state.latest, **state.speed, **left} if is_between else None
    table = rows(columns, log, width, current)
    return Group(table, "", _bars(state, min(width, _WIDTH)), _facts(state))


def rows(
    columns: Sequence[str],
    log: Sequence[Mapping[str, float]],
    width: int,
    current: Mapping[str, float] | None = None,
) -> Table:
    """Return a table of log entries, and of the current one, which is not complete yet."""
    headers = _headers(columns, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for lines in headers.values():
        table.add_column("\n".join(lines), width=_width(lines), vertical="bottom")
    for entry in log:
        table.add_row(*_cells(headers, entry))
    if current is not None:
        table.add_row(*_cells(headers, current), style="cyan")
    return table


def _headers(columns: Sequence[str], width: int) -> dict[str, list[str]]:
    """Return the header lines of each column that fits."""
    headers = {name: [name] for name in columns}
    if _total(headers) > width:
        headers = {name: re.sub("/(?!s$)", "/ ", name).split() for name in columns}
    while len(headers) > 1 and _total(headers) > width:
        headers.popitem()
    return headers


def _total(headers: Mapping[str, Sequence[str]]) -> int:
    return sum(_width(lines) + _GAP for lines in headers.values()) - _GAP


def _width(lines: Sequence[str]) -> int:
    return max(_NUMBER, *map(len, lines))


def _cells(headers: Mapping[str, object], entry: Mapping[str, float]) -> list[str]:
    return [_format(name, entry[name]) if name in entry else "" for name in headers]


def _format(name: str, value: float) -> str:
    if name == EFFICIENCY:
        return f"{value:.0%}"
    return f"{value:.0f}" if 1000 <= abs(value) < 10**_NUMBER else f"{value:.4g}"


def _bars(state: State, width: int) -> Table:
    """Return a bar for the whole training, if its length is known, and one for the epoch."""
    bars = Table(box=None, show_header=False, padding=(0, _GAP, 0, 0), pad_edge=False, width=width)
    bars.add_column()
    bars.add_column(ratio=1)
    bars.add_column(justify="right")
    epoch = math.ceil(state.latest["epoch"])
    shares = {} if state.done is None else {"training": state.done}
    shares[f"epoch {epoch}"] = state.latest["epoch"] - (epoch - 1)
    for name, share in shares.items():
        bars.add_row(name, ProgressBar(total=1, completed=share), f"{share:.1%}")
    return bars


def _facts(state: State) -> str:
    facts = [f"iteration {state.latest['iteration']:.0f}"]
    facts += [f"{_format(name, value)} {name}" for name, value in state.speed.items()]
    known = {**(state.log[-1] if state.log else {}), **state.latest}
    facts += [
        f"{name} {_format(name, known[name])}" for name in (EFFICIENCY, SLOWEST) if name in known
    ]
    if state.minutes_left is not None:
        facts.append(f"{timedelta(seconds=round(60 * state.minutes_left))} left")
    return "   ".join(facts)
