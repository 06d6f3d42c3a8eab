"""``chainermn report``: where the time of a recorded job went, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import click

from chainermn import spans
from chainermn.timeline import chart, trace
from chainermn.timeline.iterations import iterations_of
from chainermn.timeline.summary import summarize

# Iterations of which the first can be left out.
_ENOUGH = 5


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--picture",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw a bar for each rank, into a file that ends with .png, .svg, .pdf or .jpg.",
)
def report(file: Path, picture: Path | None) -> None:
    """Say where the time of the job went that FILE is a timeline of, and what to do about it.

    CHAINERMN_TIMELINE=FILE makes a job write one.
    """
    try:
        timeline = trace.read(file)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    found = [
        iterations_of([span for span in track if span.track == spans.MAIN])
        for _, track in sorted(timeline.spans.items())
    ]
    for rank, iterations in enumerate(found):
        if not iterations:
            raise click.ClickException(
                f"{file} has no iterations of rank {rank}: {trace.WHY_NO_ITERATIONS}"
            )
    title = f"mean of {len(found[0])} iterations"
    if all(len(iterations) > _ENOUGH for iterations in found):
        # In which memory is touched and modules are loaded for the first time.
        title = f"{title}, without the first"
        found = [iterations[1:] for iterations in found]
    summary = summarize(
        found, [None] * len(found), [host for _, host in sorted(timeline.hosts.items())]
    )
    # Only now, so that other commands start at once.
    from chainermn.timeline.table import print_table

    print_table(summary, title)
    if picture is not None:
        try:
            chart.draw(summary, picture, title)
        except (ImportError, OSError, ValueError) as error:
            raise click.ClickException(f"{picture}: {error}") from error
