"""Deep Gradient Compression: only the largest elements of each gradient are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import chainer
import numpy as np
from chainer.backend import get_array_module
from typing_extensions import override

from chainermn.compression.compression import Compression, Exchange, Means, Tensor
from chainermn.transport.collectives import Collectives
from chainermn.transport.reducer import Array

_FIRST_DENSITY = 0.25
# Number of elements from which a threshold is estimated.
_SAMPLE = 1 << 12
# Ratio of the elements that should pass a threshold to those that are needed.
_MARGIN = 1.5


@dataclass(frozen=True, kw_only=True)
class TopK(Compression):
    """Compression that sends only the largest elements of each gradient.

    The other elements are added up until they are large enough (error feedback). With
    ``momentum``, this is done for the velocity (momentum correction), which restarts from zero
    where an element has been sent (momentum factor masking). In that case, use an optimizer
    without momentum, such as ``chainer.optimizers.SGD``. Gradients with one dimension and small
    gradients are not compressed.

    Parameters
    ----------
    density : float
        Fraction of the elements of a gradient that each rank sends. Each takes 8 bytes.
    momentum : float
        Factor of the velocity in each step; 0 for an optimizer with its own momentum.
    warmup_iterations : int
        Number of steps in which the density falls exponentially from 0.25.
    min_size : int
        Smallest number of elements for which a gradient is compressed.
    start_iteration : int
        Number of steps without compression at the start.

    Notes
    -----
    Each rank needs memory for one more copy of the gradients, or for two with momentum; twice
    that with overlap or loss scaling. Every rank receives the elements of all other ranks, so use
    it with few ranks.

    Examples
    --------
    >>> compression = chainermn.compression.TopK(density=0.01, momentum=0.9)
    >>> optimizer = chainermn.create_multi_node_optimizer(
    ...     chainer.optimizers.SGD(), comm, compression=compression
    ... )

    References
    ----------
    Lin et al.: Deep gradient compression: Reducing the communication bandwidth for distributed
    training, ICLR 2018.
    """

    density: float = 0.01
    momentum: float = 0.0
    warmup_iterations: int = 0
    min_size: int = 4096

    remembers: ClassVar[tuple[str, ...]] = ("unsent", "velocity")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("density", 1e-6, _FIRST_DENSITY, float)
        self._check("momentum", 0, 1, float)
        self._check("warmup_iterations", 0)
        self._check("min_size", 1)

    @override
    def check_optimizer(self, optimizer: chainer.Optimizer) -> None:
        if self.momentum and hasattr(optimizer, "momentum"):
            raise ValueError(
                f"TopK(momentum={self.momentum}) and {type(optimizer).__name__} would both apply "
                "momentum. Use chainer.optimizers.SGD, or TopK(momentum=0)"
            )

    @override
    def compresses(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1 and int(np.prod(shape)) >= self.min_size

    @override
    def exchange(self, tensors: Sequence[Tensor], collectives: Collectives, step: int) -> Exchange:
        counts = [self._count(tensor.memory.size, step) for tensor in tensors]
        indices, values = [], []
        for (_, gradient, memory), count in zip(tensors, counts, strict=True):
            if self.momentum:
                gradient = memory.add("velocity", gradient, self.momentum)
            unsent = memory.add("unsent", gradient)
            largest = find_largest(unsent, count)
            values.append(unsent[largest])
            indices.append(largest.astype(np.uint32))
            for array in memory.following():
                array[largest] = 0
        xp = get_array_module(values[0])
        all_values = yield from collectives.allgather(xp.concatenate(values))
        all_indices = yield from collectives.allgather(xp.concatenate(indices))
        all_values /= collectives.size
        ends = np.cumsum(counts)[:-1]
        columns = zip(
            np.split(all_indices, ends, axis=1), np.split(all_values, ends, axis=1), strict=True
        )
        writes = [
            partial(_write, tensor.memory.place(rows), tensor.memory.place(parts))
            for tensor, (rows, parts) in zip(tensors, columns, strict=True)
        ]
        return Means(writes, bool(np.isfinite(all_values).all()))

    def _count(self, size: int, step: int) -> int:
        """Return the number of elements of a gradient that each rank sends."""
        density = self.density
        if step < self.warmup_iterations:
            progress = step / self.warmup_iterations
            density = _FIRST_DENSITY * (density / _FIRST_DENSITY) ** progress
        return max(1, round(size * density))


def find_largest(array: Array, count: int) -> Array:
    """Return the sorted positions of the ``count`` elements with the largest magnitudes.

    NaN counts as the largest. Which of several equal elements are taken is not defined.
    """
    xp = get_array_module(array)
    magnitudes = abs(array)
    # A threshold from a sample excludes most elements, which saves time.
    sample = xp.sort(magnitudes[:: max(1, array.size // _SAMPLE)])
    n_above = int(_MARGIN * count * sample.size / array.size) + 1
    threshold = sample[-min(n_above, sample.size)]
    candidates = xp.flatnonzero(~(magnitudes < threshold) & (magnitudes != 0))
    if candidates.size < count:
        candidates = xp.flatnonzero(magnitudes)
    if lacking := max(0, count - candidates.size):
        zeros = xp.flatnonzero(magnitudes == 0)[:lacking]
        candidates = xp.concatenate([candidates, zeros])
    first = candidates.size - count
    return xp.sort(candidates[xp.argpartition(magnitudes[candidates], first)[first:]])


def _write(indices: Array, values: Array, out: Array) -> None:
    """Fill ``out`` with the sums of the values, added up in the order of the ranks."""
    out[...] = 0
    for where, what in zip(indices, values, strict=True):
        out[where] += what
