"""Exchange one bucket in steps, so that other exchanges can advance in between."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from chainermn import spans
from chainermn.gradients.buckets import AnyBucket, Wire
from chainermn.gradients.exchange import GradientExchange, size_of
from chainermn.gradients.overlap.progress import Exchange
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.reducer import Array, Pending


def exchange_of(bucket: AnyBucket, gradients: Sequence[Array], wire: Wire) -> Exchange:
    """Return an exchange of one-dimensional gradients, from gathering to the all-reduce."""

    def exchange(lane: GradientExchange) -> Iterator[None]:
        size = size_of(gradients)
        with spans.span("gather gradients", lane.track, size):
            bucket.gather(gradients)
        start = spans.now()
        for pending in bucket.exchange(lane.collectives(bucket.on_gpu, wire)):
            while not pending.Test():
                yield
        spans.add("all-reduce", start, spans.now(), lane.track, size)

    return exchange


class GpuLane:
    """The lane for all gradients in GPU memory, on a separate stream. Creating one is collective.

    The two streams wait for each other; the host waits for neither. All steps of one exchange are
    enqueued before those of the next. If they were interleaved, ranks could enqueue collectives
    in different orders, which is a deadlock.
    """

    def __init__(self, lane: GradientExchange) -> None:
        self._gpu = the_gpu()
        self._lane = lane
        self._stream = self._gpu.new_stream()
        self._is_taken = False
        with self._gpu.on(self._stream):
            lane.set_up(on_gpu=True)

    def exchange_of(self, bucket: AnyBucket, gradients: Sequence[Array], wire: Wire) -> Exchange:
        """Return an exchange as `exchange_of` does, but enqueued on this lane's stream.

        Its result is an event on that stream. Keep the gradients until the event is complete.
        """
        computed = self._gpu.record()
        exchange = exchange_of(bucket, gradients, wire)

        def steps() -> Generator[None, None, Pending]:
            self._gpu.wait_for(computed)
            yield from exchange(self._lane)
            return self._gpu.record()

        return lambda _: self._on_stream(steps())

    def _on_stream(self, steps: Iterator[None]) -> Generator[None, None, Any]:
        """Run each of the steps on the lane's stream, with no other exchange in between."""
        while self._is_taken:
            yield
        self._is_taken = True
        try:
            while True:
                with self._gpu.on(self._stream):
                    try:
                        next(steps)
                    except StopIteration as end:
                        return end.value
                yield
        finally:
            self._is_taken = False
