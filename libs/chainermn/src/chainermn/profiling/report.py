"""``chainermn report``: show where the time of a recorded job went, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import click

from chainermn import spans
from chainermn.files import optional_path
from chainermn.profiling.timeline import chart, conversions, trace
from chainermn.profiling.timeline.iterations import iterations_of
from chainermn.profiling.timeline.summary import summarize

# With more iterations than this, the first one is left out.
_ENOUGH = 5


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--picture",
    metavar="FILE",
    type=optional_path,
    help="Also draw a bar chart of the ranks into FILE (.png, .svg, .pdf or .jpg).",
)
def report(file: Path, picture: Path | None) -> None:
    """Show where the time of a job went, and what to do about it.

    FILE is a timeline, which a job writes if CHAINERMN_TIMELINE=FILE is set.
    """
    try:
        timeline = trace.read(file)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    tracks = [
        [span for span in track if span.track == spans.MAIN]
        for _, track in sorted(timeline.spans.items())
    ]
    found = [iterations_of(track) for track in tracks]
    for rank, iterations in enumerate(found):
        if not iterations:
            raise click.ClickException(
                f"{file} has no iterations for rank {rank}: {trace.WHY_NO_ITERATIONS}"
            )
    title = f"mean of {len(found[0])} iterations"
    if all(len(iterations) > _ENOUGH for iterations in found):
        # The first iteration touches memory and loads modules for the first time.
        title = f"{title}, without the first"
        found = [iterations[1:] for iterations in found]
    summary = summarize(
        found, [None] * len(found), [host for _, host in sorted(timeline.hosts.items())]
    )
    # A late import, so that other commands start fast.
    from chainermn.profiling.timeline.table import print_table

    print_table(summary, title)
    for conversion, n in conversions.per_iteration(tracks).items():
        click.echo(
            f"- undoes channels last, so the next convolution converts: {conversion} "
            f"({n:g} times per iteration)"
        )
    if picture is not None:
        try:
            chart.draw(summary, picture, title)
        except (ImportError, OSError, ValueError) as error:
            raise click.ClickException(f"{picture}: {error}") from error
