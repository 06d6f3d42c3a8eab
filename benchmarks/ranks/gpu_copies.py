"""On one GPU: gathering gradients into a buffer and scattering them, and copies without more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from benchmarks.ranks import networks
from benchmarks.ranks.orders import Orders, Repeated, Step
from chainermn.gradients.batched_copy import BatchedCopy
from chainermn.transport.gpu.device import the_gpu

# So that the GPU, not the script, takes the time.
_TIMES = 20


def run(orders: Orders) -> None:
    orders.obey(lambda what, **options: PREPARE[what](**options))


def gather_and_scatter(network: str, wire: str) -> Step:
    """Return what an exchange does beside the all-reduce."""
    sizes = sizes_of(network)
    arrays = [cupy.full(size, 1e-4, np.float32) for size in sizes]
    copy = BatchedCopy(the_gpu(), sizes, [array.dtype for array in arrays], np.dtype(wire))
    buffer = the_gpu().empty(copy.length, np.dtype(wire))

    def step() -> None:
        copy.gather(arrays, buffer)
        copy.scatter(buffer, arrays, 1)

    return Repeated(step, _TIMES, synchronize)


def copies(network: str, wire: str) -> Step:
    """Return copies from memory to memory that read and write as many bytes."""
    n = sum(sizes_of(network))
    pairs = [
        [cupy.zeros(n * itemsize, np.uint8) for _ in range(2)]
        for itemsize in (4, np.dtype(wire).itemsize)
    ]

    def step() -> None:
        for source, into in pairs:
            stream = cupy.cuda.get_current_stream()
            into.data.copy_from_device_async(source.data, source.nbytes, stream)

    return Repeated(step, _TIMES, synchronize)


def sizes_of(network: str) -> list[int]:
    made = networks.make(network)
    if any(not parameter.is_initialized for parameter in made.model.params()):
        made.model(made.examples(1)[0])
    return [parameter.size for parameter in made.model.params()]


def synchronize() -> None:
    cupy.cuda.get_current_stream().synchronize()


PREPARE: dict[str, Callable[..., Any]] = {
    "gather and scatter": gather_and_scatter,
    "copies": copies,
}
