"""A pipeline of two ranks: its time for a batch, and how long its ranks are idle."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import plots
from benchmarks.figures import Group, Measured, load, milliseconds
from benchmarks.harness import Contestant, Place, Settings, Team, running
from benchmarks.ranks.pipeline import BATCHSIZE, CHANNELS, example

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
    """Return all turns, with the spans of the median one."""
    chart = example()
    row = Measured(name, [turn["seconds"] for turn in turns])
    if name != ONE:
        in_order = sorted(turns, key=lambda turn: turn["seconds"])
        row.spans = in_order[len(turns) // 2]["spans"]
        row.more[IDLE] = 100 * statistics.median(chart.idle_share(turn["spans"]) for turn in turns)
        row.more[IN_THEORY] = 100 * chart.idle_share_in_theory(len(row.spans), ROWS[name])
    return row


def draw() -> None:
    """Draw when each rank computes in the median turn of each row."""
    for content in load("pipeline").values():
        rows = [row for group in content["groups"] for row in group.rows if row.spans]
        heights = [plots.BAR * len(row.spans) for row in rows]
        caption = (
            "one batch; a number is a micro-batch; gray: idle\nblue: forward; orange: backward"
        )
        with plots.settings():
            figure, axes = plots.stack(heights, ["rank 0"], caption)
            for axis, row in zip(axes, rows, strict=True):
                _draw_spans(axis, row.spans)
                axis.set_xlim(0, 1e3 * max(map(example().duration, (row.spans for row in rows))))
                number = f"{ROWS[row.name]} micro-batch" + "es" * (ROWS[row.name] > 1)
                idle = f"{row.more[IDLE]:.0f} % idle"
                plots.title_of(axis, f"{number}: {milliseconds(row.median)} ms, {idle}")
            plots.save(figure, "pipeline")


def _draw_spans(axis: Any, ranks: list[list[Any]]) -> None:
    colors = {"forward": plots.OURS, "backward": plots.PYTORCH}
    start = min(spans[0][2] for spans in ranks)
    for rank, spans in enumerate(ranks):
        idle = 1e3 * example().duration(ranks)
        axis.barh(rank, idle, color=plots.INK, alpha=plots.FAINT, height=0.8)
        for direction, number, begin, end in spans:
            left, width = 1e3 * (begin - start), 1e3 * (end - begin)
            # Narrower than its time, so that neighbors are told apart.
            axis.barh(rank, 0.97 * width, left=left, height=0.8, color=colors[direction])
            axis.text(
                left + width / 2, rank, number, ha="center", va="center_baseline", color="white"
            )
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axis.set_ylim(len(ranks) - 0.5, -0.5)
    axis.set_xticks([])
