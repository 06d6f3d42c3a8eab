"""How often waiting ranks wake up when many share a core."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from chainermn.process.waking import wake_up_rarely

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30


def slack_after(before: int, ranks_per_core: float) -> int:
    """Return a thread's slack in nanoseconds after `wake_up_rarely`, given its earlier slack."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(before), 0, 0, 0)
    wake_up_rarely(ranks_per_core)
    return int(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(
    ("before", "ranks_per_core", "after"),
    [
        (50_000, 0.5, 50_000),
        (50_000, 3, 50_000),
        (50_000, 32, 500_000),
        (2_000_000, 32, 2_000_000),
    ],
)
def test_slack_grows_with_the_ranks_of_a_core(
    before: int, ranks_per_core: float, after: int
) -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(slack_after, before, ranks_per_core).result() == after
