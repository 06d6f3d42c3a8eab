"""Time in which a process could do something."""

from __future__ import annotations

import time


class AwakeClock:
    """Counts seconds, except those in which this process was stopped or its host asleep.

    Whoever has slept must not take what happened meanwhile for the silence of others.

    Parameters
    ----------
    longest_step : float
        What passes between two readings beyond this was sleep.
    """

    def __init__(self, longest_step: float) -> None:
        self._longest_step = longest_step
        self._read_at = time.monotonic()
        self._seconds = 0.0

    def read(self) -> float:
        """Return the time. To be called all the time, by one thread."""
        now = time.monotonic()
        self._seconds += min(now - self._read_at, self._longest_step)
        self._read_at = now
        return self._seconds
