"""What the processor computes: functions one by one, and iterations of whole networks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import figures, report
from benchmarks.figures import Group, load, milliseconds
from benchmarks.functions import CASES
from benchmarks.harness import Contestant, Place, Settings, Team, teams_of, turns, why_no_torch
from benchmarks.networks import BATCHES, TITLES

TITLE = "What the processor computes"
NUMPY, ONEDNN, TORCH = "Chainer, NumPy", "Chainer, oneDNN", "PyTorch"
COLOURS = {NUMPY: "silver", ONEDNN: "tab:blue"}
#: By the words of the tables: how the names of the teams end.
THREADS = {"one thread": "", f"{os.cpu_count()} threads": ", all cores"}
DIRECTIONS = ("forward", "backward")


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and what could not be measured and why."""
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
    """Yield what is computed: for people, and as the options of a contestant."""
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
    """Let Chainer with NumPy, with oneDNN, and PyTorch take turns."""
    is_network = "network" in options
    own: dict[str, Any] = {NUMPY: {"communicator": "naive"}, ONEDNN: {"communicator": "naive"}}
    own[TORCH] = {"alone": True}
    contestants = {
        # A rank remembers its steps by their names.
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
        # Networks on all cores differ by a tenth from turn to turn.
        rounds=3 * settings.rounds if is_network else None,
    )
    for name, row in zip(contestants, group.rows, strict=True):
        row.name = name


def write(part: str, title: str) -> None:
    """Write the page, a row of a table for each computation, and its picture."""
    lines = [f"![]({part}.png)", ""]
    for content in load(part).values():
        lines += [*report.describe_run(content), ""]
        for threads in dict.fromkeys(group.key["threads"] for group in content["groups"]):
            groups = [group for group in content["groups"] if group.key["threads"] == threads]
            lines += [f"## {threads.capitalize()}", "", *table(in_order(groups)), ""]
        draw(in_order(content["groups"]))
    report.write_page(part, title, lines)


def in_order(groups: list[Group]) -> list[Group]:
    """Return groups in the order of their measurement."""
    order = {(key["what"], key["direction"]): n for n, (key, _) in enumerate(computations())}
    last = len(order)
    return sorted(groups, key=lambda g: order.get((g.key["what"], g.key["direction"]), last))


def table(groups: list[Group]) -> list[str]:
    """Return a table in Markdown."""
    heads = ["ms", "", NUMPY, ONEDNN, TORCH, f"oneDNN of {TORCH}", "oneDNN of NumPy"]
    lines = report.heads_of(heads)
    for group in groups:
        rows = [group.row(name) for name in (NUMPY, ONEDNN, TORCH)]
        times = [milliseconds(row.median) if row.seconds else "-" for row in rows]
        ratios = [group.ratio(ONEDNN, other) for other in (TORCH, NUMPY)]
        shown = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append(report.line([group.key["what"], group.key["direction"], *times, *shown]))
    return lines


def draw(groups: list[Group]) -> None:
    """Draw how much longer Chainer takes than PyTorch, without and with oneDNN."""
    from matplotlib import pyplot

    threads = list(dict.fromkeys(group.key["threads"] for group in groups))
    height = 0.22 * max(1, len(groups) / len(threads)) + 1.5
    figure, axes = pyplot.subplots(
        1, len(threads), figsize=(5.5 * len(threads), height), squeeze=False, sharey=True
    )
    for axis, name in zip(axes.flat, threads, strict=True):
        shown = [g for g in groups if g.key["threads"] == name and g.ratio(ONEDNN, TORCH)]
        places = range(len(shown))
        for offset, contestant in ((-0.2, NUMPY), (0.2, ONEDNN)):
            ratios = [group.ratio(contestant, TORCH) or math.nan for group in shown]
            moved = [place + offset for place in places]
            axis.barh(moved, ratios, 0.4, color=COLOURS[contestant], label=contestant)
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xscale("log")
        names = [f"{group.key['what']}; {group.key['direction']}" for group in shown]
        axis.set_yticks(places, names, fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"{name}: time of {TORCH}'s", fontsize=8)
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(figures.RESULTS / "compute.png", dpi=100)
    pyplot.close(figure)
