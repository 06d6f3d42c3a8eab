"""A thread that detects errors of NCCL while no thread calls it.

A rank that waits for its GPU, which waits for other ranks, makes no call that could raise the
error. `chainermn.failures` detects processes that end.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from chainermn.failures import end_job

_SECONDS_BETWEEN_LOOKS = 1.0
# Time for the rank to raise the error itself, in its next call.
_SECONDS_FOR_RAISING = 4.0


class Watched(Protocol):
    """An object that can fail between calls."""

    def failure(self) -> str | None:
        """Return an error message, or None. Called in another thread."""


class NcclWatch(threading.Thread):
    """Ends the job if an object has failed and still exists some seconds later."""

    def __init__(self) -> None:
        super().__init__(name="chainermn-nccl-watch", daemon=True)
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, watched: Watched) -> None:
        """Watch an object for as long as it exists."""
        with self._lock:
            self._watched.add(watched)

    def run(self) -> None:
        """Check all watched objects once per second."""
        failing_since: float | None = None
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            failure = self._first_failure()
            if failure is None:
                failing_since = None
                continue
            now = time.monotonic()
            failing_since = failing_since or now
            if now - failing_since > _SECONDS_FOR_RAISING:
                end_job(f"chainermn: {failure}\nThe whole job is being ended.")

    def _first_failure(self) -> str | None:
        with self._lock:
            watched = list(self._watched)
        return next((failure for each in watched if (failure := each.failure())), None)


_watch: NcclWatch | None = None


def watch(watched: Watched) -> None:
    """Have the job ended if ``watched`` fails."""
    global _watch
    if _watch is None:
        _watch = NcclWatch()
        _watch.start()
    _watch.add(watched)
