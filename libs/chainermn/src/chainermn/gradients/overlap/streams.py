"""Exchange several buckets at a time, each on a duplicate of the exchange: a stream."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from typing import Any

from chainermn import spans
from chainermn.gradients.bucket import Bucket
from chainermn.gradients.buckets import Wire
from chainermn.gradients.exchange import GradientExchange, size_of
from chainermn.gradients.overlap.progress import Exchange
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.reducer import Array, Pending


class Streams:
    """Duplicates of an exchange, which stays free for other uses. Creating them is collective.

    Attributes
    ----------
    in_host_memory : list of GradientExchange
        Streams for buckets in host memory.
    """

    def __init__(self, exchange: GradientExchange, n: int) -> None:
        self._original = exchange
        self._duplicates = [exchange.duplicate() for _ in range(n)]
        self.in_host_memory = self.all
        for number, stream in enumerate(self.all, 1):
            stream.set_up(on_gpu=False)
            stream.track = f"exchange {number}"

    @property
    def all(self) -> list[GradientExchange]:
        """All streams, including the one for GPU memory if there is one."""
        return [duplicate.made for duplicate in self._duplicates]

    def exchange_of(self, bucket: Bucket, gradients: Sequence[Array], wire: Wire) -> Exchange:
        """Return an exchange of one-dimensional gradients, from gathering to the all-reduce."""
        make = self.gpu.exchange_of if bucket.on_gpu else _exchange_of
        return make(bucket, gradients, wire)

    @cached_property
    def gpu(self) -> GpuStream:
        """The stream for gradients in GPU memory. Creating it is collective."""
        duplicate = self._original.duplicate()
        self._duplicates.append(duplicate)
        duplicate.made.track = "enqueuing on the GPU"
        return GpuStream(duplicate.made)

    def give_back(self) -> None:
        """Stop using the streams. Not collective."""
        for duplicate in self._duplicates:
            duplicate.give_back()


class GpuStream:
    """A stream of the GPU, for all gradients in its memory. Creating one is collective.

    It and the script's stream wait for each other; the host waits for neither. All steps of one
    exchange are enqueued before those of the next. If they were interleaved, ranks could enqueue
    collectives in different orders, which is a deadlock.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._gpu = the_gpu()
        self._exchange = exchange
        self._stream = self._gpu.new_stream()
        self._is_taken = False
        with self._gpu.on(self._stream):
            exchange.set_up(on_gpu=True)

    def exchange_of(self, bucket: Bucket, gradients: Sequence[Array], wire: Wire) -> Exchange:
        """Return an exchange that is enqueued on this stream.

        Its result is an event on that stream. Keep the gradients until the event is complete.
        """
        computed = self._gpu.record()
        exchange = _exchange_of(bucket, gradients, wire)

        def steps() -> Generator[None, None, Pending]:
            self._gpu.wait_for(computed)
            yield from exchange(self._exchange)
            return self._gpu.record()

        return lambda _: self._on_stream(steps())

    def _on_stream(self, steps: Iterator[None]) -> Generator[None, None, Any]:
        """Run each of the steps on this stream, with no other exchange in between."""
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


def _exchange_of(bucket: Bucket, gradients: Sequence[Array], wire: Wire) -> Exchange:
    def exchange(stream: GradientExchange) -> Iterator[None]:
        size = size_of(gradients)
        with spans.span("gather gradients", stream.track, size):
            bucket.gather(gradients)
        start = spans.now()
        for pending in bucket.exchange(stream.collectives(bucket.on_gpu, wire)):
            while not pending.Test():
                yield
        spans.add("all-reduce", start, spans.now(), stream.track, size)

    return exchange
