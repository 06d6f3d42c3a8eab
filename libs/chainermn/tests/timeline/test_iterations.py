"""The time of an iteration is divided among kinds of work, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chainermn import spans
from chainermn.spans import MAIN, Span
from chainermn.timeline.gathering import Gathering
from chainermn.timeline.iterations import KINDS, Iterations, iterations_of
from chainermn.timeline.waiting import Call

SECOND = 10**9


def span(name: str, start: float, end: float, track: str = MAIN, **details: Any) -> Span:
    return Span(name, track, int(start * SECOND), int(end * SECOND), details)


def call(name: str, start: float, end: float, number: int = 1) -> Span:
    return span(name, start, end, stream="c", number=number)


def divided(start: float, end: float, *within: Span) -> tuple[dict[str, float], list[Any]]:
    found = Iterations()
    found.add(int(start * SECOND), int(end * SECOND), within)
    (seconds,) = found.seconds
    assert seconds.keys() == set(KINDS)
    assert sum(seconds.values()) == end - start
    return {kind: taken for kind, taken in seconds.items() if taken}, found.calls


def test_a_usual_iteration() -> None:
    seconds, calls = divided(
        *(100, 120),
        span("data", 100, 103),
        span("convert", 103, 104),
        span("forward", 105, 108),
        span("backward", 108, 113),
        call("multi_node_mean_grad", 113, 117),
        span("all-reduce", 115, 116),
        span("optimizer", 117, 118),
        span("extensions", 118, 120),
    )
    assert seconds == {"data": 4, "compute": 9, "exchange": 4, "extensions": 2, "other": 1}
    assert calls == [(0, Call("c", 1, 113 * SECOND, 117 * SECOND))]


def test_the_innermost_kind_counts() -> None:
    # As multi-node batch normalization has it; the order in which spans come does not matter.
    seconds, calls = divided(
        *(0, 10), call("allreduce", 2, 5), span("forward", 1, 8), call("update", 3, 4, number=2)
    )
    assert seconds == {"compute": 4, "exchange": 3, "other": 3}
    assert len(calls) == 1  # the outer one


@pytest.mark.parametrize("kind", ["evaluation", "checkpoint"])
def test_all_that_an_evaluation_or_a_checkpoint_does_is_part_of_it(kind: str) -> None:
    within = [span("forward", 3, 4), call("allgather_obj", 4, 6)]
    seconds, calls = divided(0, 10, span("extensions", 1, 9), span(kind, 2, 7), *within)
    assert seconds == {kind: 5, "extensions": 3, "other": 2}
    assert not calls


def test_the_time_of_each_extension() -> None:
    found = Iterations()
    within = [
        span("extensions", 1, 10),
        span("extension validation", 1, 4),
        span("evaluation", 1, 3),
        span("extension PlotReport", 4, 9),
    ]
    for _ in range(2):
        found.add(0, 10 * SECOND, within)
    assert [row["extensions"] for row in found.seconds] == [7, 7]
    assert found.extensions == {"validation": 2, "PlotReport": 10}


def test_a_span_of_no_length_is_around_nothing() -> None:
    seconds, _ = divided(0, 4, span("data", 1, 1), span("forward", 1, 1), span("backward", 1, 3))
    assert seconds == {"compute": 2, "other": 2}


def test_iterations_of_a_whole_track() -> None:
    found = iterations_of(
        [
            call("bcast_data", 1, 2),  # before training
            span("iteration", 10, 20),
            span("data", 10, 13),
            call("multi_node_mean_grad", 14, 15),
            span("iteration", 20, 24),
            span("forward", 20, 22),
            span("evaluation", 30, 40),  # and after
        ]
    )
    assert [row["data"] for row in found.seconds] == [3, 0]
    assert [row["compute"] for row in found.seconds] == [0, 2]
    assert [row["other"] for row in found.seconds] == [6, 2]
    assert [index for index, _ in found.calls] == [0]


class TestGathering:
    """Sums while training goes on."""

    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        class Clock:
            seconds = 0.0

            def __call__(self) -> int:
                return int(self.seconds * SECOND)

        clock = Clock()
        monkeypatch.setattr(spans, "now", clock)
        return clock

    def test_what_is_left_of_an_iteration_belongs_to_the_next(self, clock: Any) -> None:
        gathering = Gathering()
        for one in (span("data", 1, 3), span("iteration", 1, 5), span("forward", 5, 6)):
            gathering(one)
        clock.seconds = 8
        first = gathering.take()
        assert [sum(row.values()) for row in first.seconds] == [5, 3]
        assert [row["compute"] for row in first.seconds] == [0, 1]
        for one in (span("checkpoint", 8, 9), span("iteration", 5, 10)):
            gathering(one)
        clock.seconds = 12
        for one in (span("data", 10, 11), span("iteration", 10, 12)):
            gathering(one)
        clock.seconds = 13
        second = gathering.take()
        assert [sum(row.values()) for row in second.seconds] == [4, 1]
        assert second.seconds[0]["checkpoint"] == second.seconds[0]["data"] == 1

    def test_other_threads_do_not_count(self, clock: Any) -> None:
        gathering = Gathering()
        gathering(span("forward", 0, 3, track="exchange 1"))
        clock.seconds = 4
        (row,) = gathering.take().seconds
        assert row["other"] == 4
