"""How a bucket is exchanged beside backward: on a lane, and in GPU memory also on a stream.

A lane is a duplicate of the exchange, so that several buckets can be under way at a time.
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


class OnGpu(NamedTuple):
    """What is left of an exchange in GPU memory when it is over for the host.

    Attributes
    ----------
    over : Pending
        Recorded on the stream behind the exchange.
    gathered : sequence of array
        Their memory must not be used again before that.
    """

    over: Pending
    gathered: Sequence[Array]

    def follow(self) -> None:
        """Let what the current stream is given next follow the exchange."""
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
        """Return what gathers gradients, each one-dimensional, and averages them."""

        def exchange(lane: int) -> Iterator[None]:
            bucket.gather(gradients)
            yield from _carry_on(self._lanes[lane].allreduce(bucket, wire_dtypes))

        return exchange


class GpuLane:
    """The lane for gradients in GPU memory, a stream beside that of backward.

    The streams wait for each other; the host waits for neither. The stream is given one exchange
    after another: if the steps of two could alternate, they would do so in another order on each
    rank. Then the stream of one rank would come to a collective that others have behind another
    one, a deadlock. Making a lane is collective.

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
        """Return what gathers gradients, each one-dimensional, and adds them up."""
        computed = self._gpu.record()

        def exchange(lane: int) -> Iterator[None]:
            return self._on_stream(self._steps(bucket, gradients, wire_dtypes, computed))

        return exchange

    def _set_up(self, zeros: Array) -> Iterator[None]:
        yield from _carry_on(self._lane.set_up(zeros))
        self._gpu.record().Wait()

    def _steps(
        self,
        bucket: Bucket,
        gradients: Sequence[Array],
        wire_dtypes: WireDtypes,
        computed: Pending,
    ) -> Generator[None, None, OnGpu]:
        self._gpu.wait_for(computed)
        bucket.gather(gradients)
        yield from _carry_on(self._lane.allreduce(bucket, wire_dtypes))
        return OnGpu(self._gpu.record(), gradients)

    def _on_stream(self, steps: Iterator[None]) -> Generator[None, None, Any]:
        """Do each of the steps on the stream, and what is between them on another."""
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


def _carry_on(steps: Steps) -> Iterator[None]:
    for pending in steps:
        while not pending.Test():
            yield
