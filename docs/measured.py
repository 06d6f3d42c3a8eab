"""Figures and tables of the benchmarks for the hand-written pages."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import figures
from benchmarks.figures import Group, Measured, figure, load, milliseconds
from chainermn.communicators import registered
from chainermn.launch.mpiexec import NAMES

__all__ = ["figure", "files", "table"]

#: For each part: the places that its table shows, and its columns with the rows they show.
_TABLES = {
    "exchange": (
        ("2 ranks, one host", "two hosts"),
        {f"`{name}`": f"ours {name}" for name in registered()},
    ),
    "iterations": (
        ("two hosts",),
        {
            "default": "ours",
            "`overlap=False`": "ours, overlap off",
            "bfloat16": "ours, bfloat16",
            "float16": "ours, float16",
            "double buffering": "ours, double buffering",
            "no exchange": "ours, no exchange",
        },
    ),
}

#: Rows of the table of accuracy: the row that counts the bytes, and the setting of the training.
_ACCURACY = {
    "float32": ("ours, overlap on", "exact means"),
    "bfloat16": ("ours, bfloat16", "bfloat16"),
    "`PowerSGD(rank=2)`": ("ours, PowerSGD, rank 2", "PowerSGD, rank 2"),
    "`PowerSGD(rank=4, start_iteration=100)`": (
        "ours, PowerSGD, rank 4",
        "PowerSGD, rank 4, from step 100",
    ),
    "`TopK(density=0.01)`": ("ours, TopK, 1 %", "TopK, 1 %"),
    "`Quantization()`": ("ours, Quantization, 8 bits", "Quantization, 8 bits"),
    "`LocalSGD(period=8)`": ("ours, LocalSGD, period 8", "LocalSGD, period 8"),
    "`LocalSGD(period=8, start_iteration=100)`": (
        "ours, LocalSGD, period 8",
        "LocalSGD, period 8, from step 100",
    ),
}


def files() -> list[Path]:
    """Return the files with the raw figures."""
    return sorted((figures.RESULTS / "raw").glob("*.json"))


def table(subject: str) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    made = {"accuracy": _accuracy, "pipeline": _pipeline}.get(subject)
    return made() if made else _times(subject)


def _times(part: str) -> Iterator[str]:
    """Yield a table for each MPI, in milliseconds."""
    where, columns = _TABLES[part]
    for mpi, content in load(part).items():
        groups = [g for g in content["groups"] if any(text in g.title for text in where)]
        measured = {row.name for group in groups for row in group.rows}
        shown = {head: row for head, row in columns.items() if row in measured}
        yield f"| ms, {NAMES[mpi]} | {' | '.join(shown)} |"
        yield f"|---|{'---:|' * len(shown)}"
        for group in groups:
            cells = [_cell(group, row) for row in shown.values()]
            yield f"| {group.title} | {' | '.join(cells)} |"
        yield ""
        yield f"Medians, {content['about']['date']}: {content['about']['machine']}."
        yield ""


def _accuracy() -> Iterator[str]:
    """Yield a row for each setting: bytes, and the accuracy of the apps."""
    groups = [group for content in load("convergence").values() for group in content["groups"]]
    heads = [f"{group.key['app']}, %" for group in groups]
    yield f"| setting | MB of ResNet-50 | {' | '.join(heads)} |"
    yield f"|---|{'---:|' * (1 + len(groups))}"
    sent = next(
        group
        for content in load("slow").values()
        for group in content["groups"]
        if group.key["network"] == "resnet50"
    )
    for head, (name, setting) in _ACCURACY.items():
        rows = [group.row(setting) for group in groups]
        if any(row.curves for row in rows):
            cells = [_mean_and_ends(row) if row.curves else "" for row in rows]
            megabytes = f"{sent.row(name).more['MB sent per host']:.3g}"
            yield f"| {head} | {megabytes} | {' | '.join(cells)} |"


def _pipeline() -> Iterator[str]:
    """Yield a row for each number of micro-batches, the last word of its name."""
    yield "| micro-batches | time relative to one rank on one core | idle | in theory |"
    yield "|---|---:|---:|---:|"
    for content in load("pipeline").values():
        for group in content["groups"]:
            for row in (row for row in group.rows if row.more):
                shares = [f"{share:.0f} %" for share in row.more.values()]
                ratio = f"{group.ratio(row.name, group.baseline):.2f}"
                yield f"| {row.name.split()[-1]} | {ratio} | {' | '.join(shares)} |"


def _mean_and_ends(row: Measured) -> str:
    last = [100 * value for value in row.last]
    return f"{statistics.fmean(last):.1f} ({min(last):.1f} to {max(last):.1f})"


def _cell(group: Group, name: str) -> str:
    row = group.row(name)
    return milliseconds(row.median) if row.seconds else "refuses" * bool(row.skipped)
