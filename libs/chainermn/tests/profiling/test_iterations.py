"""How an iteration's time is divided among kinds of work, with none lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chainermn import spans
from chainermn.profiling.timeline import gathering as gathering_module
from chainermn.profiling.timeline.gathering import Gathering
from chainermn.profiling.timeline.iterations import KINDS, Iteration, divide, iterations_of
from chainermn.profiling.timeline.waiting import Call
from chainermn.spans import MAIN, Span

SECOND = 10**9


def span(name: str, start: float, end: float, track: str = MAIN, **details: Any) -> Span:
    return Span(name, track, int(start * SECOND), int(end * SECOND), details)


def call(name: str, start: float, end: float, number: int = 1) -> Span:
    return span(name, start, end, stream="c", number=number)


def divided(start: float, end: float, *within: Span) -> tuple[dict[str, float], list[Any]]:
    found = divide(int(start * SECOND), int(end * SECOND), within)
    assert found.nanoseconds.keys() == set(KINDS)
    assert sum(found.nanoseconds.values()) == (end - start) * SECOND
    return seconds_of(found), found.calls


def seconds_of(iteration: Iteration) -> dict[str, float]:
    return {kind: taken / SECOND for kind, taken in iteration.nanoseconds.items() if taken}


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
    assert calls == [("exchange", Call("c", 1, 113 * SECOND, 117 * SECOND))]


def test_the_innermost_kind_counts() -> None:
    # As in multi-node batch normalization; the order in which spans come does not matter.
    seconds, calls = divided(0, 10, call("allreduce", 2, 5), span("forward", 1, 8))
    assert seconds == {"compute": 4, "layers": 3, "other": 3}
    assert [kind for kind, _ in calls] == ["layers"]


@pytest.mark.parametrize("kind", ["evaluation", "checkpoint"])
def test_all_that_an_evaluation_or_a_checkpoint_does_is_part_of_it(kind: str) -> None:
    within = [span("forward", 3, 4), call("allgather_obj", 4, 6)]
    seconds, calls = divided(0, 10, span("extensions", 1, 9), span(kind, 2, 7), *within)
    assert seconds == {kind: 5, "extensions": 3, "other": 2}
    assert [counted_as for counted_as, _ in calls] == [kind]


def test_the_time_of_each_extension() -> None:
    within = [
        span("extensions", 1, 10),
        span("extension validation", 1, 4),
        span("evaluation", 1, 3),
        span("extension PlotReport", 4, 9),
    ]
    found = divide(0, 10 * SECOND, within)
    assert seconds_of(found) == {"evaluation": 2, "extensions": 7, "other": 1}
    assert found.extensions == {"validation": SECOND, "PlotReport": 5 * SECOND}


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
            span("evaluation", 30, 40),  # after training
        ]
    )
    first, second = found
    assert seconds_of(first) == {"data": 3, "exchange": 1, "other": 6}
    assert seconds_of(second) == {"compute": 2, "other": 2}
    assert (len(first.calls), len(second.calls)) == (1, 0)


class TestGathering:
    """Sums taken during training."""

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
        first, second = map(seconds_of, gathering.take())
        assert first == {"data": 2, "other": 2}  # counted from the start of the iteration
        assert second == {"compute": 1, "other": 2}
        for one in (span("checkpoint", 8, 9), span("iteration", 5, 10)):
            gathering(one)
        for one in (span("data", 10, 11), span("iteration", 10, 12), span("data", 12, 13)):
            gathering(one)
        clock.seconds = 13
        third, fourth = map(seconds_of, gathering.take())
        assert third == {"checkpoint": 1, "data": 1, "other": 2}
        assert fourth == {"data": 1}

    def test_the_first_iteration_may_not_be_over(self, clock: Any) -> None:
        gathering = Gathering()
        gathering(span("data", 5, 6))
        clock.seconds = 8
        assert [seconds_of(one) for one in gathering.take()] == [{"data": 1, "other": 2}]

    def test_nothing_has_been_done(self, clock: Any) -> None:
        assert Gathering().take() == []

    def test_other_threads_do_not_count(self, clock: Any) -> None:
        gathering = Gathering()
        gathering(span("forward", 0, 3, track="exchange 1"))
        gathering(span("iteration", 0, 4))
        assert [seconds_of(one) for one in gathering.take()] == [{"other": 4}]

    @pytest.mark.parametrize("limit", ["MOST_CALLS", "MOST_ITERATIONS"])
    def test_the_latest_iterations_are_kept(
        self, clock: Any, monkeypatch: pytest.MonkeyPatch, limit: str
    ) -> None:
        monkeypatch.setattr(gathering_module, limit, 3)
        gathering = Gathering()
        for first in (0, 5):  # iterations already taken no longer count
            for number in range(first, first + 5):
                gathering(call("allreduce", number, number + 0.5))
                gathering(span("iteration", number, number + 1))
            starts = [one.calls[0][1].start for one in gathering.take()]
            assert starts == [(first + number) * SECOND for number in (2, 3, 4)]
