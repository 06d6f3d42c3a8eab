"""Computation on a CPU: functions one by one, and iterations of whole networks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import plots, report
from benchmarks.figures import Group, find, load, milliseconds
from benchmarks.functions import CASES
from benchmarks.harness import Contestant, Place, Settings, Team, teams_of, turns, why_no_torch
from benchmarks.networks import BATCHES, TITLES

NUMPY, ONEDNN, TORCH = "Chainer, NumPy", "Chainer, oneDNN", "PyTorch"
#: Numbers of threads as tables name them, and the endings of the teams' names.
THREADS = {"one thread": "", f"{os.cpu_count()} threads": ", all cores"}
DIRECTIONS = ("forward", "backward")


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and for anything that could not be measured, the reason."""
    for threads, suffix in THREADS.items():
        teams = {NUMPY: f"NumPy{suffix}", ONEDNN: f"oneDNN{suffix}"}
        if not why_no_torch():
            teams[TORCH] = f"torch{suffix}"
        place = Place(f"1 rank, {threads}", (1,))
        with teams_of(place, teams.values(), settings) as running:
            for key, options in computations():
                key |= {"threads": threads}
                group = Group("; ".join(key.values()), key, [], TORCH)
                if settings.wants(group.title):
                    measure_group(group, options, teams, running, settings)
                    yield group
    yield from why_no_torch()


def computations() -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Yield computations: their key, and the options of a contestant."""
    for network, batchsize in BATCHES.items():
        key = {"what": f"{TITLES[network]}, batch {batchsize}", "direction": "iteration"}
        yield key, {"what": "iteration", "network": network, "batchsize": batchsize}
    for case in CASES:
        for direction in DIRECTIONS:
            options = {"what": "function", "name": case, "backward": direction == "backward"}
            yield {"what": case, "direction": direction}, options


def measure_group(
    group: Group,
    options: dict[str, Any],
    teams: Mapping[str, str],
    running: Mapping[str, Team],
    settings: Settings,
) -> None:
    """Let Chainer with NumPy, Chainer with oneDNN, and PyTorch take turns."""
    is_network = "network" in options
    own: dict[str, Any] = {NUMPY: {"communicator": "naive"}, ONEDNN: {"communicator": "naive"}}
    own[TORCH] = {"alone": True}
    contestants = {
        # A rank stores its steps by name.
        name: Contestant(
            f"{name}: {group.title}", team, {**options, **(own[name] if is_network else {})}
        )
        for name, team in teams.items()
    }
    group.rows = turns(
        running,
        [*contestants.values()],
        settings,
        seconds=1 if is_network else 0.1,
        # The times of networks on all cores vary by a tenth between turns.
        rounds=3 * settings.rounds if is_network else None,
    )
    for name, row in zip(contestants, group.rows, strict=True):
        row.name = name


def write(part: str) -> None:
    """Write the page: a table for each number of threads."""
    lines = []
    for content in load(part).values():
        lines += ["", "## Figures", "", *report.describe_run(content)]
        for threads in dict.fromkeys(group.key["threads"] for group in content["groups"]):
            groups = [group for group in content["groups"] if group.key["threads"] == threads]
            lines += ["", f"### {threads.capitalize()}", "", *table(in_order(groups))]
    report.write_page(part, lines)


def in_order(groups: list[Group]) -> list[Group]:
    """Return groups in the order of their measurement."""
    order = {(key["what"], key["direction"]): n for n, (key, _) in enumerate(computations())}
    last = len(order)
    return sorted(groups, key=lambda g: order.get((g.key["what"], g.key["direction"]), last))


def table(groups: list[Group]) -> list[str]:
    """Return a table in Markdown."""
    times = [f"{name}, ms" for name in (NUMPY, ONEDNN, TORCH)]
    ratios = [f"oneDNN relative to {name}" for name in (TORCH, "NumPy")]
    heads = ["computation", "direction", *times, *ratios]
    lines = report.heads_of(heads)
    for group in groups:
        rows = [group.row(name) for name in (NUMPY, ONEDNN, TORCH)]
        times = [milliseconds(row.median) if row.seconds else "-" for row in rows]
        ratios = [report.ratio(group, ONEDNN, other) or "-" for other in (TORCH, NUMPY)]
        lines.append(report.line([group.key["what"], group.key["direction"], *times, *ratios]))
    return lines


def draw() -> None:
    """Draw the iterations of networks, with oneDNN, without, and in PyTorch."""
    rows = {"Chainer, oneDNN": ONEDNN, "Chainer, NumPy": NUMPY, "PyTorch": TORCH}
    for content in load("compute").values():
        panels: list[plots.Panel] = []
        for network in ("conv", "resnet50"):
            what = f"{TITLES[network]}, batch {BATCHES[network]}"
            for threads in sorted({group.key["threads"] for group in content["groups"]})[::-1]:
                group = find(content, what=what, direction="iteration", threads=threads)
                panels += plots.panel(f"{what}, {threads}", plots.times(group, rows))
        plots.draw("compute", panels, "ms per iteration of one process; less is better")
