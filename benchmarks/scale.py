"""Many ranks on one host: time to start, time of an exchange, and memory."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import plots, report
from benchmarks.figures import Group, Measured, find, load
from benchmarks.harness import (
    ONE_THREAD,
    THE_ORIGINAL,
    Contestant,
    Place,
    Settings,
    Team,
    running,
)
from chainermn.launch.mpiexec import NAMES

OURS, ORIGINAL = "ours", "original"
MEMORY = "MB per rank"
N_BYTES = 400_000
#: Numbers of ranks, and of exchanges after the first. With 0, only the start is measured.
RANKS = {8: 30, 32: 30, 64: 30, 128: 0}
#: Figures of a rank: their names in tables, units, and units per second.
FIGURES = {
    "create": ("create_communicator", "s", 1),
    "first": ("first exchange", "s", 1),
    "exchange": ("exchange", "ms", 1000),
}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups."""
    for ranks, exchanges in RANKS.items():
        place = Place(f"{ranks} ranks, one host", (ranks,))
        if settings.wants(place.title):
            yield from measure_at(place, exchanges, settings)
        if settings.quick:
            return


def measure_at(place: Place, exchanges: int, settings: Settings) -> Iterator[Group]:
    """Measure one number of ranks. Every turn is a new job."""
    teams = {
        OURS: (sys.executable, ONE_THREAD),
        ORIGINAL: (sys.executable, {**ONE_THREAD, **THE_ORIGINAL}),
    }
    if settings.before:
        teams[f"before: {OURS}"] = (settings.before, ONE_THREAD)
    jobs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in teams}
    for _ in range(settings.rounds):
        for name, (python, env) in teams.items():
            settings.tell(f"{place.title}: {name}")
            jobs[name].append(answers_of(place, python, env, exchanges))
    for figure in FIGURES if exchanges else ["create"]:
        rows = [
            Measured(name, [max(answer[figure] for answer in answers) for answers in turns])
            for name, turns in jobs.items()
        ]
        if figure == "create":
            for row in rows:
                means = [statistics.fmean(a["memory"] for a in turn) for turn in jobs[row.name]]
                row.more[MEMORY] = statistics.median(means) / 1e6
        title = f"{FIGURES[figure][0]}; {place.title}"
        yield Group(title, {"figure": figure, "ranks": str(place.size)}, rows, ORIGINAL)


def answers_of(
    place: Place, python: str, env: Mapping[str, str], exchanges: int
) -> list[dict[str, Any]]:
    """Start a job, wait until all ranks have imported everything, and return their answers."""
    options = {"n_bytes": N_BYTES, "exchanges": exchanges}
    start = functools.partial(Team, place, "scaling", env=env, python=python)
    with running({"": start}) as teams:
        for name in ("import", "measure"):
            teams[""].start(Contestant(name, "", options), 1)
            answers = teams[""].finish()
    return answers


def write(part: str) -> None:
    """Write the page: a table for each MPI."""
    lines = []
    for mpi, content in load(part).items():
        lines += ["", f"## {NAMES[mpi]}", "", *report.describe_run(content), ""]
        lines += table(content["groups"])
    report.write_page(part, lines)


def table(groups: list[Group]) -> list[str]:
    """Return a table in Markdown, with a row for each number of ranks."""
    heads = ["ranks"]
    for head in (*(f"{name}, {unit}" for name, unit, _ in FIGURES.values()), MEMORY):
        heads += [head, ORIGINAL, "ratio"]
    lines = report.heads_of(heads)
    for ranks in sorted({group.key["ranks"] for group in groups}, key=int):
        found = {group.key["figure"]: group for group in groups if group.key["ranks"] == ranks}
        cells = [ranks]
        for figure, (_, _, scale) in FIGURES.items():
            cells += cells_of(found[figure], scale) if figure in found else [""] * 3
        ours, original = (found["create"].row(name).more[MEMORY] for name in (OURS, ORIGINAL))
        cells += [f"{ours:.0f}", f"{original:.0f}", f"{ours / original:.2f}"]
        lines.append(report.line(cells))
    turns = min(len(group.row(OURS).seconds) for group in groups)
    return [*lines, "", f"- Measured {turns} times, each time in a new job."]


def cells_of(group: Group, scale: float) -> list[str]:
    """Return the cells of ours, of the original, and of their ratio."""
    medians = [f"{scale * group.row(name).median:.3g}" for name in (OURS, ORIGINAL)]
    return [*medians, f"{group.ratio(OURS, ORIGINAL):.2f}"]


def draw() -> None:
    """Draw the start and an exchange for each number of ranks, with MPICH."""
    content = load("scale").get("mpich", {"groups": []})
    panels: list[plots.Panel] = []
    for figure in ("create", "exchange"):
        title, unit, scale = FIGURES[figure]
        bars = []
        for ranks in RANKS:
            group = find(content, figure=figure, ranks=str(ranks))
            for name, label in ((OURS, f"{ranks} ranks"), (ORIGINAL, "... original")):
                if (row := group.row(name)).seconds:
                    text = f"{scale * row.median:.3g} {unit}"
                    bars.append(plots.bar_of(label, row, text, scale=scale))
        panels += plots.panel(title, bars)
    plots.draw("scale", panels, "less is better", one_scale=False)
