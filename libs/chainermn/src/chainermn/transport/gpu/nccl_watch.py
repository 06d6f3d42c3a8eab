"""Notices what has failed in NCCL while nobody calls it.

A rank that waits for its GPU, which waits for other ranks, comes to no call that could raise the
error. Other processes that end are noticed by `chainermn.failures`.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from chainermn.failures import end_job

_SECONDS_BETWEEN_LOOKS = 1.0
# In which a call of the rank itself may raise the error instead.
_SECONDS_FOR_RAISING = 4.0


class Watched(Protocol):
    """What can fail by itself."""

    def failure(self) -> str | None:
        """Return what has failed, or None. Called in another thread."""


class NcclWatch(threading.Thread):
    """Ends the job when something has failed and is still there after some seconds."""

    def __init__(self) -> None:
        super().__init__(name="chainermn-nccl-watch", daemon=True)
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, watched: Watched) -> None:
        """Watch something for as long as it is there."""
        with self._lock:
            self._watched.add(watched)

    def run(self) -> None:
        """Look now and then."""
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
    """Have the job ended if this fails."""
    global _watch
    if _watch is None:
        _watch = NcclWatch()
        _watch.start()
    _watch.add(watched)
