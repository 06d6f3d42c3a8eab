"""Print a table of where the time of all ranks goes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from chainermn.profiling.timeline.summary import PARTS, Summary

# Least width of the table, since the default for a file or pipe is 80.
_LEAST_WIDTH = 110


def print_table(summary: Summary, title: str) -> None:
    """Print one row per rank, the efficiency, and advice."""
    console = Console(width=max(Console().width, _LEAST_WIDTH))
    console.print(_table_of(summary, title))
    console.print(f"parallel efficiency: {summary.efficiency:.0%}", highlight=False)
    for advice in summary.advice() or ["nothing stands out: no part takes more than usual"]:
        console.print(f"- {advice}", highlight=False, markup=False)


def _table_of(summary: Summary, title: str) -> Table:
    # A table without lines around it can be pasted into a message.
    table = Table(title=f"ms per iteration, {title}", box=None, title_justify="left")
    table.add_column("rank")
    for part in ("iteration", *PARTS):
        table.add_column(part, justify="right")
    for number, rank in enumerate(summary.ranks):
        times = [rank.iteration, *(rank.seconds[part] for part in PARTS)]
        table.add_row(str(number), *map(_ms, times))
    mean = [summary.iteration, *map(summary.mean, PARTS)]
    table.add_row("mean", *map(_ms, mean), style="bold")
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"
