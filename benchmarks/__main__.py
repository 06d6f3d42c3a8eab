"""Measure, and write tables and pictures into docs/results: ``python -m benchmarks --help``."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import figures, report
from benchmarks.figures import Group
from benchmarks.harness import Settings
from chainermn.launch.mpiexec import mpi_flavour

# Parts that depend on MPI; the others are measured with MPICH only.
_WITH_EACH_MPI = ("exchange", "iterations", "startup", "scale", "watch", "failures")
PARTS = (
    *_WITH_EACH_MPI,
    *("compute", "slow", "convergence", "efficiency", "pipeline", "scatter", "input"),
    *("timeline", "model"),
)
ON_DEMAND = ("gpu",)


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice((*PARTS, *ON_DEMAND)))
@click.option("--rounds", default=5, show_default=True, help="Turns of each contestant.")
@click.option("--quick", is_flag=True, help="Measure next to nothing, to see whether all works.")
@click.option("--only", default="", help="Measure only tables whose title contains this.")
@click.option("--before", default="", help="A Python with another version, to measure beside.")
@click.option("--write", is_flag=True, help="Measure nothing; write the pages again.")
@click.option("--output", type=Path, help="Default: docs/results, or a new folder for a trial.")
def main(
    parts: Sequence[str],
    rounds: int,
    quick: bool,
    only: str,
    before: str,
    write: bool,
    output: Path | None,
) -> None:
    """Measure PARTS, by default all that depend on this MPI, and write into docs/results.

    Measure on a machine that has nothing else to do.
    """
    if output or quick or before:
        figures.RESULTS = output or Path(tempfile.mkdtemp(prefix="benchmarks-"))
    if write:
        write_pages((*PARTS, *ON_DEMAND))
        return
    mpi = mpi_flavour()
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
    """Write the pages of those parts that have been measured, and the index of all."""
    modules = {part: module_of(part) for part in (*PARTS, *ON_DEMAND) if figures.load(part)}
    for part in modules.keys() & set(parts):
        getattr(modules[part], "write", report.write)(part, modules[part].TITLE)
    report.write_index({part: module.TITLE for part, module in modules.items()})


def module_of(part: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{part}")


if __name__ == "__main__":
    main()
