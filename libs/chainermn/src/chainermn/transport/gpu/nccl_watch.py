"""Detect errors of NCCL while no thread calls it.

A rank may wait for its GPU, which waits for other ranks. Such a rank makes no call that could
raise the error. (`chainermn.failures` detects processes that end.)
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
import weakref
from typing import Protocol

from chainermn.failures import end_job
from chainermn.transport.topology import host_name

_SECONDS_BETWEEN_LOOKS = 1.0
# Time that the rank gets to raise the error itself, in its next call.
_SECONDS_FOR_RAISING = 4.0


class Watched(Protocol):
    """A transport by NCCL."""

    rank: int
    size: int

    def failure(self) -> str | None:
        """Return the error of the transport, or None."""


class NcclWatch:
    """Ends the job if one of its transports fails and still exists some seconds later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()

    def add(self, transport: Watched) -> None:
        """Watch ``transport`` for as long as it exists."""
        with self._lock:
            self._watched.add(transport)

    def run(self) -> None:
        """Look at the transports again and again."""
        failing_since: float | None = None
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            failure = self.first_failure()
            if failure is None:
                failing_since = None
                continue
            now = time.monotonic()
            failing_since = failing_since or now
            if now - failing_since > _SECONDS_FOR_RAISING:
                end_job(f"chainermn: {failure}\nEnding the whole job.")

    def first_failure(self) -> str | None:
        """Return the error of a transport that has failed, or None."""
        with self._lock:
            watched = list(self._watched)
        return next((failure for each in watched if (failure := self._failure_of(each))), None)

    def _failure_of(self, transport: Watched) -> str | None:
        try:
            return transport.failure()
        except Exception:
            # A job that hangs is better than ending a job that works. Others stay watched.
            with self._lock:
                self._watched.discard(transport)
            print(
                f"chainermn: on rank {transport.rank} of {transport.size}, on {host_name()}, a "
                "failure of NCCL may make the job hang from now on, because asking NCCL for "
                f"errors has failed:\n{traceback.format_exc()}",
                file=sys.stderr,
            )
            return None


@functools.cache
def the_watch() -> NcclWatch:
    """Return the watch of this process, which runs in a thread."""
    watch = NcclWatch()
    threading.Thread(target=watch.run, name="chainermn-nccl-watch", daemon=True).start()
    return watch
