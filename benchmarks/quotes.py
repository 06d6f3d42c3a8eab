"""Figures and tables of the benchmarks, quoted on hand-written pages so that GitHub shows them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import figures
from benchmarks.figures import Group, Measured, figure, load, milliseconds
from benchmarks.report import heads_of, line
from chainermn.communicators import registered
from chainermn.launch.mpiexec import NAMES

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE = re.compile(r"(<!-- table: (\w+) -->)\n.*?<!-- end -->", re.DOTALL)

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


def write_all() -> None:
    """Bring the quotes on all hand-written pages up to date, but not with figures of a trial."""
    if figures.RESULTS != DOCS / "results":
        return
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(updated(text), encoding="utf-8")


def pages() -> list[Path]:
    """Return the hand-written pages of the documentation."""
    skipped = DOCS / "results", DOCS / "_build"
    found = sorted(DOCS.rglob("*.md"))
    return [page for page in found if not any(folder in page.parents for folder in skipped)]


def updated(text: str) -> str:
    """Return a page with the figures and tables that have been measured.

    Parameters
    ----------
    text : str
        Markdown. A figure is followed by the comment ``<!-- measured: NAME -->``, see `figure`,
        and a table is between ``<!-- table: SUBJECT -->`` and ``<!-- end -->``, see `table`.
        A new quote is only the comments.

    Raises
    ------
    ValueError
        If something has not been measured.
    """
    text = figures.QUOTE.sub(lambda found: figure(found[2]) + found[1], text)
    return TABLE.sub(lambda found: f"{found[1]}\n\n{_text_of(found[2])}\n\n<!-- end -->", text)


def _text_of(subject: str) -> str:
    return "\n".join(table(subject)).rstrip()


def table(subject: str) -> Iterator[str]:
    """Yield the lines of a table in Markdown: ``accuracy``, ``pipeline``, or times of a part."""
    made = {"accuracy": _accuracy, "pipeline": _pipeline}.get(subject)
    return made() if made else _times(subject)


def _times(part: str) -> Iterator[str]:
    """Yield a table for each MPI, in milliseconds."""
    where, columns = _TABLES[part]
    for mpi, content in load(part).items():
        groups = [g for g in content["groups"] if any(text in g.title for text in where)]
        measured = {row.name for group in groups for row in group.rows}
        shown = {head: row for head, row in columns.items() if row in measured}
        yield from heads_of([f"ms, {NAMES[mpi]}", *shown])
        for group in groups:
            yield line([group.title, *(_cell(group, row) for row in shown.values())])
        yield ""
        yield f"Medians, {content['about']['date']}: {content['about']['machine']}."
        yield ""


def _accuracy() -> Iterator[str]:
    """Yield a row for each setting: bytes, and the accuracy of the apps."""
    groups = [group for content in load("convergence").values() for group in content["groups"]]
    heads = [f"{group.key['app']}, %" for group in groups]
    yield from heads_of(["setting", "MB of ResNet-50", *heads])
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
            yield line([head, megabytes, *cells])


def _pipeline() -> Iterator[str]:
    """Yield a row for each number of micro-batches, the last word of its name."""
    heads = ["micro-batches", "time relative to one rank on one core", "idle", "in theory"]
    yield from heads_of(heads)
    for content in load("pipeline").values():
        for group in content["groups"]:
            for row in (row for row in group.rows if row.more):
                shares = [f"{share:.0f} %" for share in row.more.values()]
                ratio = f"{group.ratio(row.name, group.baseline):.2f}"
                yield line([row.name.split()[-1], ratio, *shares])


def _mean_and_ends(row: Measured) -> str:
    last = [100 * value for value in row.last]
    return f"{statistics.fmean(last):.1f} ({min(last):.1f} to {max(last):.1f})"


def _cell(group: Group, name: str) -> str:
    row = group.row(name)
    return milliseconds(row.median) if row.seconds else "refuses" * bool(row.skipped)
