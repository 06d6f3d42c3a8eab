"""Lanes: duplicates of the exchange, so that several buckets can be under way at a time.

Buckets in GPU memory also have a separate stream.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from chainermn.gradients.buckets import Bucket, WireDtypes
from chainermn.gradients.copies import gpu_zeros
from chainermn.gradients.exchange import GradientExchange
from chainermn.gradients.overlap.progress import Exchange
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.reducer import Array, Pending, Steps, wait_for


class EnqueuedExchange(NamedTuple):
    """An exchange in GPU memory that is over for the host, but maybe not for the GPU.

    Attributes
    ----------
    over : Pending
        Event that is complete when the exchange is.
    gathered : sequence of array
        Gradients that the exchange reads, kept alive until the current stream waits for it.
    """

    over: Pending
    gathered: Sequence[Array]

    def follow(self) -> None:
        """Let the current stream wait for the exchange."""
        the_gpu().wait_for(self.over)


class HostLanes:
    """Lanes for gradients in host memory. Making them is collective.

    Parameters
    ----------
    lanes : sequence of GradientExchange
    """

    def __init__(self, lanes: Sequence[GradientExchange]) -> None:
        self._lanes = lanes
        for lane in lanes:
            wait_for(lane.set_up(np.zeros(1, np.float32)))

    def exchange_of(
        self, bucket: Bucket, gradients: Sequence[Array], wire_dtypes: WireDtypes
    ) -> Exchange:
        """Return an exchange that gathers one-dimensional gradients and averages them."""

        def exchange(lane: int) -> Iterator[None]:
            bucket.gather(gradients)
            yield from _poll(self._lanes[lane].allreduce(bucket, wire_dtypes))

        return exchange


class GpuLane:
    """The lane for gradients in GPU memory, on a separate stream. Making one is collective.

    The two streams wait for each other; the host waits for neither. All steps of one exchange are
    enqueued before those of the next. If they were interleaved, ranks could enqueue collectives
    in different orders: a deadlock.

    Parameters
    ----------
    lane : GradientExchange
    """

    def __init__(self, lane: GradientExchange) -> None:
        self._gpu = the_gpu()
        self._lane = lane
        self._stream = self._gpu.new_stream()
        self._is_taken = False
        zeros = gpu_zeros(self._gpu, lane.topology.size, np.dtype(np.float32))
        for _ in self._on_stream(self._set_up(zeros)):
            pass

    def exchange_of(
        self, bucket: Bucket, gradients: Sequence[Array], wire_dtypes: WireDtypes
    ) -> Exchange:
        """Return an exchange that gathers one-dimensional gradients and sums them."""
        computed = self._gpu.record()

        def exchange(lane: int) -> Iterator[None]:
            return self._on_stream(self._steps(bucket, gradients, wire_dtypes, computed))

        return exchange

    def _set_up(self, zeros: Array) -> Iterator[None]:
        yield from _poll(self._lane.set_up(zeros))
        self._gpu.record().Wait()

    def _steps(
        self,
        bucket: Bucket,
        gradients: Sequence[Array],
        wire_dtypes: WireDtypes,
        computed: Pending,
    ) -> Generator[None, None, EnqueuedExchange]:
        self._gpu.wait_for(computed)
        bucket.gather(gradients)
        yield from _poll(self._lane.allreduce(bucket, wire_dtypes))
        return EnqueuedExchange(self._gpu.record(), gradients)

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


def _poll(steps: Steps) -> Iterator[None]:
    for pending in steps:
        while not pending.Test():
            yield
