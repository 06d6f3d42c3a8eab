"""``chainermn report``: where the time of a recorded job went, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import click

from chainermn import spans
from chainermn.timeline import chart, trace
from chainermn.timeline.iterations import iterations_of
from chainermn.timeline.summary import summarize


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
    # Only now, so that other commands start at once.
    from chainermn.timeline.table import print_table

    print_table(summary, n_iterations)
    if picture is not None:
        try:
            chart.draw(summary, picture, f"{n_iterations} iterations")
        except (ImportError, OSError, ValueError) as error:
            raise click.ClickException(f"{picture}: {error}") from error
