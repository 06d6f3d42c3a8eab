"""Who waits for whom, judging by when calls begin and end."""

from __future__ import annotations

from chainermn.profiling.timeline.waiting import Call, Wait, waits


def test_all_wait_for_the_last() -> None:
    calls = [[Call("c", 1, start, 100)] for start in (10, 40, 20)]
    assert waits(calls) == [[Wait(1, 40)], [None], [Wait(1, 40)]]


def test_nobody_waits_for_a_rank_that_comes_after_it_has_gone() -> None:
    # A broadcast whose root has arrived: rank 2 comes after the others have left.
    calls = [[Call("c", 1, start, end)] for start, end in ((10, 30), (5, 30), (50, 60))]
    assert waits(calls) == [[None], [Wait(0, 10)], [None]]


def test_only_calls_of_the_same_stream_and_number_meet() -> None:
    calls = [
        [Call("c", 1, 0, 10), Call("c", 2, 20, 90), Call("d", 1, 100, 110)],
        [Call("c", 1, 5, 10), Call("c", 2, 80, 90)],
    ]
    assert waits(calls) == [[Wait(1, 5), Wait(1, 80), None], [None, None]]
