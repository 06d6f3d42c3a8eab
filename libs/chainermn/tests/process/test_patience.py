"""Waiting for a limited time."""

from __future__ import annotations

from chainermn.process.patience import wait_patiently


def test_waits_for_so_many_seconds_in_all() -> None:
    waits: list[float] = []
    assert not wait_patiently(waits.append, 2.5)
    assert waits == [1, 1, 0.5]
    assert not wait_patiently(waits.append, 2)
    assert waits[3:] == [1, 1]


def test_returns_what_has_come() -> None:
    results = iter([[], ["late"]])
    assert wait_patiently(lambda seconds: next(results), 60) == ["late"]
    assert wait_patiently(lambda seconds: seconds, 0.5) == 0.5
