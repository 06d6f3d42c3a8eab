"""Measure, and write tables and plots into docs/results: ``python -m benchmarks --help``."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import figures, quotes, report
from benchmarks.figures import Group
from benchmarks.harness import Settings
from chainermn.launch.mpiexec import mpi_flavor

# Parts whose times depend on the MPI. The others are measured with MPICH only.
_WITH_EACH_MPI = ("exchange", "iterations", "startup", "scale", "watch", "failures")
PARTS = (
    *_WITH_EACH_MPI,
    *("compute", "slow", "convergence", "efficiency", "pipeline", "scatter", "input"),
    *("timeline", "model", "comparison", "snapshots"),
)
ON_DEMAND = ("gpu",)


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice((*PARTS, *ON_DEMAND)))
@click.option("--rounds", default=5, show_default=True, help="How often to measure each row.")
@click.option("--quick", is_flag=True, help="Measure once and briefly, to see if everything runs.")
@click.option("--only", default="", help="Measure only tables whose titles contain this.")
@click.option("--before", default="", help="Python with another version, to compare with.")
@click.option("--write", is_flag=True, help="Measure nothing: write pages and plots again.")
@click.option(
    "--output", type=Path, help="Folder. Default: docs/results, or a new one for trials."
)
def main(
    parts: Sequence[str],
    rounds: int,
    quick: bool,
    only: str,
    before: str,
    write: bool,
    output: Path | None,
) -> None:
    """Measure PARTS and write the results into docs/results.

    By default, measure all parts, or with Open MPI those that depend on the MPI. Use a machine
    that has nothing else to do.
    """
    if output or quick or before:
        figures.RESULTS = output or Path(tempfile.mkdtemp(prefix="benchmarks-"))
    if write:
        write_pages((*PARTS, *ON_DEMAND))
        return
    mpi = mpi_flavor()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=None)

        def tell(text: str) -> None:
            progress.update(task, description=text)

        settings = Settings(1 if quick else rounds, quick, only, before, tell)
        for part in parts or (PARTS if mpi == "mpich" else _WITH_EACH_MPI):
            measure(part, mpi, settings, progress.console)
        progress.console.print(f"written: {figures.RESULTS}")


def measure(part: str, mpi: str, settings: Settings, console: Console) -> None:
    """Measure a part; save, write and print what was found."""
    found: list[Group | str] = list(module_of(part).measure(settings))
    groups = [group for group in found if isinstance(group, Group)]
    skipped = [reason for reason in found if isinstance(reason, str)]
    if groups:
        report.save(part, mpi, groups, skipped)
        write_pages([part])
    for group in groups:
        text = "\n".join(["", group.title, *report.table(group)])
        console.print(text, highlight=False, soft_wrap=True)
    for reason in skipped:
        console.print(f"not measured: {reason}", style="yellow", highlight=False)


def write_pages(parts: Sequence[str]) -> None:
    """Write pages and plots of the measured parts, the index, and quotes on other pages."""
    measured = [part for part in (*PARTS, *ON_DEMAND) if figures.load(part)]
    for part in measured:
        if part in parts:
            write_part(part)
    report.write_index(measured)
    quotes.write_all()


def write_part(part: str) -> None:
    """Write the page of a part, and its plots if it has any."""
    module = module_of(part)
    getattr(module, "write", report.write)(part)
    if hasattr(module, "draw"):
        module.draw()


def module_of(part: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{part}")


if __name__ == "__main__":
    main()
