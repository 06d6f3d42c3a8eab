"""On a GPU: gathering and scattering gradients, beside a plain copy.

``python -m benchmarks.copies`` needs no MPI. The last column is the time over that of copying as
many bytes from one array to another, which is what the GPU's memory allows.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from chainermn.gradients.batched_copy import BatchedCopy
from chainermn.transport.gpu.device import Gpu

ROUNDS, CALLS, N_BUSY = 7, 10, 100
PAIRS = [("float32", "float32"), ("float32", "float16"), ("float16", "float16")]


def resnet50_sizes() -> list[int]:
    """Return the numbers of elements of the parameters of ResNet-50: 161, most of them small."""
    sizes, n_in = [3 * 64 * 49, 64, 64], 64
    for width, n_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        n_out = 4 * width
        for block in range(n_blocks):
            sizes += [n_in * width, width, width, width * width * 9, width, width]
            sizes += [width * n_out, n_out, n_out]
            sizes += [n_in * n_out, n_out, n_out] if block == 0 else []
            n_in = n_out
    return [*sizes, n_in * 1000, 1000]


def seconds(gpu: Gpu, calls: Sequence[Callable[[], Any]], busy: Callable[[], Any]) -> list[float]:
    """Return the median time that the GPU takes for each of the calls.

    ``busy`` gives the GPU enough to do that the host can give it all calls meanwhile.
    """
    turns = []
    for _ in range(1 + ROUNDS):
        busy()
        events = [gpu.timed_event()]
        for call in calls:
            for _ in range(CALLS):
                call()
            events.append(gpu.timed_event())
        events[-1].Wait()
        pairs = itertools.pairwise(events)
        turns.append([end.nanoseconds_since(start) / CALLS / 1e9 for start, end in pairs])
    # The first turn compiles.
    return [statistics.median(of_call) for of_call in zip(*turns[1:], strict=True)]


def measure(gpu: Gpu, name: str, wire_name: str) -> list[tuple[str, float, float, float]]:
    """Return what was done, seconds, bytes read and written, and the ratio to a plain copy."""
    dtype, wire = (np.dtype(getattr(ml_dtypes, each, each)) for each in (name, wire_name))
    sizes = resnet50_sizes()
    arrays = [gpu.empty(n, dtype) for n in sizes]
    for array in arrays:
        array[...] = 1
    copy = BatchedCopy(gpu, sizes, [dtype] * len(sizes), wire)
    buffer = gpu.empty(copy.length, wire)
    n_bytes = sum(sizes) * (dtype.itemsize + wire.itemsize)
    source, target = (gpu.empty(n_bytes // 2, np.dtype(np.uint8)) for _ in range(2))
    large = [gpu.empty(1 << 28, np.dtype(np.uint8)) for _ in range(2)]

    def plain() -> None:
        target[...] = source

    def busy() -> None:
        for _ in range(N_BUSY):
            large[0][...] = large[1]

    calls = (
        lambda: copy.gather(arrays, buffer),
        lambda: copy.scatter(buffer, arrays, 3),
        plain,
    )
    gather, scatter, alone = seconds(gpu, calls, busy)
    rows = {"gather": gather, "scatter": scatter, "both": gather + scatter, "plain copy": alone}
    return [
        (what, taken, n_bytes, taken / alone / (2 if what == "both" else 1))
        for what, taken in rows.items()
    ]


def main() -> None:
    """Measure, and print."""
    gpu = Gpu()
    for pair in PAIRS:
        for what, taken, n_bytes, ratio in measure(gpu, *pair):
            rate = n_bytes * (2 if what == "both" else 1) / taken / 1e9
            title = f"{what}, {pair[0]} as {pair[1]}"
            print(f"{title:36} {1e6 * taken:8.1f} us {rate:8.0f} GB/s {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
