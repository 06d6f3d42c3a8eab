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

from benchmarks import report, summary
from benchmarks.settings import Settings
from chainermn.launch.mpiexec import mpi_flavour

PARTS = (
    *("exchange", "iterations", "efficiency", "scatter", "input", "startup", "model"),
    *("watch", "failures"),
)
# What depends on MPI; the rest is measured with the first of the two only.
_OF_MPI = {
    "mpich": PARTS,
    "openmpi": ("exchange", "iterations", "startup", "watch", "failures"),
}
# What is measured only if it is asked for.
_ON_DEMAND = ("gpu",)
_MODULES = {"input": "reading"}


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice((*PARTS, *_ON_DEMAND)))
@click.option("--rounds", default=5, show_default=True, help="Turns of each contestant.")
@click.option("--quick", is_flag=True, help="Measure next to nothing, to see whether all works.")
@click.option("--only", default="", help="Measure only tables whose title contains this.")
@click.option("--write", is_flag=True, help="Measure nothing, write what is in docs/results/raw.")
@click.option("--output", type=Path, help="Default: docs/results; a new folder for --quick.")
def main(
    parts: Sequence[str], rounds: int, quick: bool, only: str, write: bool, output: Path | None
) -> None:
    """Measure PARTS, by default all that depend on this MPI, and write into docs/results.

    Measure on a machine that has nothing else to do.
    """
    if output or quick:
        report.RESULTS = output or Path(tempfile.mkdtemp(prefix="benchmarks-"))
    if write:
        write_all()
        return
    mpi = mpi_flavour()
    rounds = 1 if quick else rounds
    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    for part in parts or _OF_MPI[mpi]:
        module = module_of(part)
        with Progress(*columns, console=console, transient=True) as progress:
            groups, skipped = module.measure(Settings(rounds, quick, only, progress))
        report.save(part, mpi, groups, skipped)
        write_page(part)
        for group in groups:
            console.print(f"\n{group.title}\n" + "\n".join(report.table(group)), highlight=False)
        for reason in skipped:
            console.print(f"not measured: {reason}", style="yellow", highlight=False)
    summary.write()
    console.print(f"written: {report.RESULTS}")


def module_of(part: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{_MODULES.get(part, part)}")


def write_page(part: str) -> None:
    """Write the page of a part from all that has been saved of it."""
    module = module_of(part)
    if hasattr(module, "write"):
        module.write()
    else:
        report.write(part, module.TITLE, module.INTRODUCTION)


def write_all() -> None:
    """Write the pages of all parts that have been measured, and the summary."""
    for part in (*PARTS, *_ON_DEMAND):
        if report.load(part):
            write_page(part)
    summary.write()


if __name__ == "__main__":
    main()
