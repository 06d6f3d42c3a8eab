"""A clock that stops while its process does."""

from __future__ import annotations

import time


class AwakeClock:
    """Counts seconds, except while this process is stopped or its host sleeps.

    A process that wakes up must not mistake its own sleep for the silence of others. Any time
    beyond ``longest_step`` seconds between two readings counts as sleep.
    """

    def __init__(self, longest_step: float) -> None:
        self._longest_step = longest_step
        self._read_at = time.monotonic()
        self._seconds = 0.0

    def read(self) -> float:
        """Return the time. One thread must call this at least every ``longest_step`` seconds."""
        now = time.monotonic()
        self._seconds += min(now - self._read_at, self._longest_step)
        self._read_at = now
        return self._seconds
