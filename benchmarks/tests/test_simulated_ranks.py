"""Simulated ranks speak like real ones, as judged by a real monitor."""

from __future__ import annotations

import pytest

from benchmarks import simulated_ranks
from benchmarks.simulated_ranks import CPU, MEMORY, WRONG


@pytest.fixture(autouse=True)
def measures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_ranks, "STALL_LIMIT", 1.0)
    monkeypatch.setattr(simulated_ranks, "FIRST_REPORTS", 1)


@pytest.mark.parametrize("name", WRONG)
def test_monitor_says_what_is_wrong(name: str) -> None:
    WRONG[name](3)  # or it raises


def test_monitor_is_content_while_all_goes_well() -> None:
    found = simulated_ranks.cost(3, 0.5)
    assert found[CPU] >= 0
    assert found[MEMORY] > 0
