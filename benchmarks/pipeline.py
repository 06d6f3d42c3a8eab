"""A pipeline of two ranks: how long it takes for a batch in micro-batches, and how idle it is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.figures import Group, Measured, load
from benchmarks.harness import Contestant, Place, Settings, Team, running
from benchmarks.ranks.pipeline import BATCHSIZE, CHANNELS, example

TITLE = "A pipeline of micro-batches"
ONE = "1 rank on 1 core"
#: The number of micro-batches of each row.
ROWS = {ONE: 1, **{f"2 ranks, m = {number}": number for number in (1, 2, 4, 8)}}
IDLE, IN_THEORY = "idle, %", "in theory, %"


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield the group."""
    starts = {
        "one": lambda: Team(Place("1 rank", (1,)), "pipeline", core=0),
        "two": lambda: Team(Place("2 ranks", (2,)), "pipeline"),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    with running(starts) as teams:
        for _ in range(1 if settings.quick else 2 * settings.rounds + 1):
            for name, micro_batches in ROWS.items():
                settings.tell(name)
                team = teams["one" if name == ONE else "two"]
                team.start(Contestant(name, "", {"micro_batches": micro_batches}), 1)
                found[name].append(team.finish()[0])
    title = f"{BATCHSIZE} images of {CHANNELS} channels"
    rows = [row_of(name, found[name]) for name in ROWS]
    yield Group(title, {"batch": title}, rows, ONE, notes=["m: the number of micro-batches"])


def row_of(name: str, turns: list[dict[str, Any]]) -> Measured:
    """Return what was measured, with the times of the median turn."""
    chart = example()
    row = Measured(name, [turn["seconds"] for turn in turns])
    if name != ONE:
        in_order = sorted(turns, key=lambda turn: turn["seconds"])
        row.spans = in_order[len(turns) // 2]["spans"]
        row.more[IDLE] = 100 * statistics.median(chart.idle_share(turn["spans"]) for turn in turns)
        row.more[IN_THEORY] = 100 * chart.idle_share_in_theory(len(row.spans), ROWS[name])
    return row


def write(part: str, title: str) -> None:
    """Write the page and the picture."""
    report.write(part, title, draw_into=draw)


def draw(part: str, path: Path) -> None:
    """Draw when each rank computes."""
    for content in load(part).values():
        for group in content["groups"]:
            rows = [row for row in group.rows if row.spans]
            example().draw({ROWS[row.name]: row.spans for row in rows}, path)
