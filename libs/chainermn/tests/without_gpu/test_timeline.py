"""When the streams of a GPU do the work that the host gives them, with events at known times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chainermn import spans
from chainermn.profiling.timeline.gpu_streams import GpuStreams
from chainermn.spans import Span

MS = 10**6


class Event:
    """An event that completes ``at`` milliseconds after the start."""

    def __init__(self, gpu: SlowGpu, at: float) -> None:
        self.gpu, self.at = gpu, at

    def Test(self) -> bool:
        return self.at <= self.gpu.now

    def Wait(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def nanoseconds_since(self, earlier: Event) -> float:
        assert self.Test()
        assert earlier.Test()
        return (self.at - earlier.at) * MS


class SlowGpu:
    """A GPU that reaches each event 10 ms after the previous one."""

    now = 0.0

    def __init__(self) -> None:
        self.enqueued, self.current = 0.0, 7

    def stream(self) -> int:
        return self.current

    def timed_event(self) -> Any:
        event = Event(self, self.enqueued)
        self.enqueued += 10
        return event


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Span]]:
    monkeypatch.setattr(spans, "now", lambda: 1000 * MS)
    found: list[Span] = []
    spans.listen(found.append)
    yield found
    spans.measure_streams(None)
    spans.unlisten(found.append)


def test_spans_on_streams_come_when_the_gpu_has(heard: list[Span]) -> None:
    gpu: Any = SlowGpu()
    streams = GpuStreams(gpu)
    spans.measure_streams(streams)
    with spans.span("forward"):
        pass
    gpu.current = 8
    with spans.span("all-reduce", details={"bytes": 4}):
        pass
    assert [span.track for span in heard] == [spans.MAIN] * 2
    gpu.now, gpu.current = 25, 7
    with spans.span("backward"):
        pass
    assert heard[2:-1] == [Span("forward", "GPU stream 1", 1010 * MS, 1020 * MS)]
    streams.finish()
    assert heard[-2:] == [
        Span("all-reduce", "GPU stream 2", 1030 * MS, 1040 * MS, {"bytes": 4}),
        Span("backward", "GPU stream 1", 1050 * MS, 1060 * MS),
    ]


def test_inner_spans_are_inside_on_the_stream(heard: list[Span]) -> None:
    gpu: Any = SlowGpu()
    streams = GpuStreams(gpu)
    spans.measure_streams(streams)
    with spans.span("forward"), spans.span("1 (Linear)"):
        pass
    streams.finish()
    inner, outer = (span for span in heard if span.track == "GPU stream 1")
    assert (inner.name, inner.start, inner.end) == ("1 (Linear)", 1020 * MS, 1030 * MS)
    assert (outer.name, outer.start, outer.end) == ("forward", 1010 * MS, 1040 * MS)


def test_after_the_end_no_events_are_recorded(heard: list[Span]) -> None:
    gpu: Any = SlowGpu()
    spans.measure_streams(GpuStreams(gpu))
    before = gpu.enqueued
    spans.measure_streams(None)
    with spans.span("forward"):
        pass
    assert gpu.enqueued == before
