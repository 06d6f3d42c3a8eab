"""Rows for the turns of a pipeline, from made-up turns."""

from __future__ import annotations

from typing import Any

from benchmarks.pipeline import IDLE, IN_THEORY, ONE, row_of


def turn(forward: float) -> dict[str, Any]:
    """Return a turn of one micro-batch, with backward as long as forward."""
    rank0 = [("forward", 0, 0.0, forward), ("backward", 0, 3 * forward, 4 * forward)]
    rank1 = [("forward", 0, forward, 2 * forward), ("backward", 0, 2 * forward, 3 * forward)]
    return {"seconds": 4 * forward, "spans": [rank0, rank1]}


def test_a_row_has_all_times_and_the_spans_of_the_median() -> None:
    turns = [turn(3), turn(1), turn(2)]
    row = row_of("2 ranks, m = 1", turns)
    assert row.seconds == [12, 4, 8]
    assert row.spans == turns[2]["spans"]
    assert row.more == {IDLE: 50, IN_THEORY: 50}


def test_one_rank_is_never_idle() -> None:
    row = row_of(ONE, [{"seconds": 1.0, "spans": [[("forward", 0, 0.0, 1.0)]]}])
    assert (row.seconds, row.spans, row.more) == ([1.0], [], {})
