"""``chainermn report``: where the time of a recorded job went, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from chainermn import spans
from chainermn.timeline import chart, trace
from chainermn.timeline.iterations import iterations_of
from chainermn.timeline.summary import PARTS, Summary, summarize

# Of the table; a file or a pipe would have 80.
_LEAST_WIDTH = 100


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--picture",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw a bar for each rank, into a PNG or SVG file.",
)
def report(file: Path, picture: Path | None) -> None:
    """Say where the time of the job went that FILE is a timeline of, and what to do about it.

    CHAINERMN_TIMELINE=FILE makes a job write one.
    """
    try:
        ranks = trace.read(file)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    found = [
        iterations_of([span for span in track if span.track == spans.MAIN])
        for _, track in sorted(ranks.items())
    ]
    if not all(one.seconds for one in found):
        raise click.ClickException(
            f"{file} has no iterations: was nothing trained with a chainer.training.Trainer?"
        )
    summary = summarize(found, [None] * len(found))
    n_iterations = len(found[0].seconds)
    console = Console(width=max(Console().width, _LEAST_WIDTH))
    console.print(_table_of(summary, n_iterations))
    console.print(f"parallel efficiency: {summary.efficiency:.0%}", highlight=False)
    for advice in summary.advice() or ["nothing stands out: no part takes more than usual"]:
        console.print(f"- {advice}", highlight=False, markup=False)
    if picture is not None:
        try:
            chart.draw(summary, picture, f"{n_iterations} iterations")
        except (ImportError, OSError, ValueError) as error:
            raise click.ClickException(f"{picture}: {error}") from error


def _table_of(summary: Summary, n_iterations: int) -> Table:
    # Without lines around it, it can be pasted into a message.
    table = Table(
        title=f"ms per iteration, mean of {n_iterations}", box=None, title_justify="left"
    )
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
