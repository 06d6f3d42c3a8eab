"""On one GPU: gather gradients into a buffer and scatter them, or only copy memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.ranks import networks
from benchmarks.ranks.orders import Orders, Step
from chainermn.gradients.batched_copy import BatchedCopy
from chainermn.transport.gpu.device import the_gpu

_TIMES = 20
# These copies keep the GPU busy until the script has queued everything to be measured.
_BUSY_BYTES, _BUSY_TIMES = 1 << 28, 100


def run(orders: Orders) -> None:
    orders.obey(lambda what, **options: PREPARE[what](**options))


def gather_and_scatter(network: str, wire: str) -> Step:
    """Return a step with the work of an exchange, except for the all-reduce."""
    gpu, sizes = the_gpu(), sizes_of(network)
    dtype = np.dtype(np.float32)
    arrays = [zeros(size, dtype) for size in sizes]
    copy = BatchedCopy(gpu, sizes, [dtype] * len(sizes), np.dtype(wire))
    buffer = zeros(copy.length, np.dtype(wire))

    def once() -> None:
        copy.gather(arrays, buffer)
        copy.scatter(buffer, arrays, 1)

    return timed(once)


def copies(network: str, wire: str) -> Step:
    """Return a step with plain copies that read and write as many bytes."""
    n = sum(sizes_of(network))
    itemsizes = (4, np.dtype(wire).itemsize)
    pairs = [[zeros(n * itemsize, np.dtype(np.uint8)) for _ in range(2)] for itemsize in itemsizes]

    def once() -> None:
        for into, source in pairs:
            into[...] = source

    return timed(once)


def timed(once: Callable[[], None]) -> Step:
    """Return a step that measures the time on the GPU with events."""
    gpu = the_gpu()
    into, source = (zeros(_BUSY_BYTES, np.dtype(np.uint8)) for _ in range(2))

    def step() -> dict[str, float]:
        for _ in range(_BUSY_TIMES):
            into[...] = source
        start = gpu.timed_event()
        for _ in range(_TIMES):
            once()
        end = gpu.timed_event()
        end.Wait()
        return {"seconds": end.nanoseconds_since(start) / 1e9 / _TIMES}

    return step


def zeros(size: int, dtype: np.dtype[Any]) -> Any:
    array = the_gpu().empty(size, dtype)
    array[...] = 0
    return array


def sizes_of(network: str) -> list[int]:
    made = networks.make(network)
    return [parameter.size for parameter in made.model.params()]


PREPARE: dict[str, Callable[..., Step]] = {
    "gather and scatter": gather_and_scatter,
    "copies": copies,
}
