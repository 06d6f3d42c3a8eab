"""A clock that does not count the time asleep."""

from __future__ import annotations

import pytest

from chainermn.process.clock import AwakeClock


def test_clock_leaves_out_the_time_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0, 101.0, 5000.0, 5000.5])
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    clock = AwakeClock(longest_step=2.0)
    assert [clock.read(), clock.read(), clock.read()] == [1.0, 3.0, 3.5]
