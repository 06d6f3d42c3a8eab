"""Make spans of a GPU's work, which show when its streams get to where the host was."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from chainermn import spans
from chainermn.transport.gpu.device import Gpu, is_recordable


class _Pending(NamedTuple):
    name: str
    stream: int
    start: Any
    end: Any
    details: Mapping[str, Any]


class GpuStreams:
    """Measures each span of the host on its current stream, too.

    The host enqueues work without waiting, so its own spans do not show when the GPU computes.
    This enqueues an event at the start and at the end of each span. Times are measured from one
    event to the next, because CUDA gives them in single precision.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._latest = gpu.timed_event()
        self._latest.Wait()
        self._time: float = spans.now()
        self._pending: deque[_Pending] = deque()
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def mark(self) -> tuple[int, Any] | None:
        """Return the current stream and an event on it; None in a step that may be recorded."""
        return None if is_recordable() else (self._gpu.stream(), self._gpu.timed_event())

    def add(
        self, name: str, start: tuple[int, Any], end: tuple[int, Any], details: Mapping[str, Any]
    ) -> None:
        """Add a span, which is reported once the GPU has reached its end."""
        stream, event = start
        with self._lock:
            self._pending.append(_Pending(name, stream, event, end[1], details))
            while self._pending and self._pending[0].end.Test():
                self._tell(self._pending.popleft())

    def finish(self) -> None:
        """Wait for the GPU, and report the remaining spans."""
        with self._lock:
            while self._pending:
                pending = self._pending.popleft()
                pending.end.Wait()
                self._tell(pending)

    def _tell(self, pending: _Pending) -> None:
        start = self._time + pending.start.nanoseconds_since(self._latest)
        duration = pending.end.nanoseconds_since(pending.start)
        self._latest, self._time = pending.start, start
        track = self._names.setdefault(pending.stream, f"GPU stream {len(self._names) + 1}")
        end = int(start + duration)
        spans.add(pending.name, int(start), end, track, pending.details)
