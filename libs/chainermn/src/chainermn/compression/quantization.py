"""Quantization: gradients are sent as small integers, with a scale for each block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from chainer.backend import get_array_module
from typing_extensions import override

from chainermn.compression.compression import Compression, Exchange, Means, Tensor
from chainermn.compression.memory import Memory
from chainermn.transport.collectives import Collectives
from chainermn.transport.gpu.device import on_gpu
from chainermn.transport.reducer import Array

# Number of elements that stay in the second-level cache while they are used several times.
_CHUNK = 1 << 15


@dataclass(frozen=True, kw_only=True)
class Quantization(Compression):
    """Compression that rounds gradients to integers of 8 or 16 bits.

    Each block of elements has its own scale, which turns its largest element into the largest
    integer. Each rank adds up one shard: the integers of all ranks times their scales. It rounds
    the mean in the same way. The errors of both roundings are added to the gradient of the next
    step (error feedback).

    Parameters
    ----------
    bits : {8, 16}
        Number of bits per element.
    block : int
        Number of elements that share a scale, which takes 4 bytes.
    min_size : int
        Smallest number of elements for which a gradient is compressed.
    start_iteration : int
        Number of steps without compression at the start.

    Notes
    -----
    Each rank needs memory for one more copy of the gradients, or for two with overlap or loss
    scaling.

    Examples
    --------
    >>> optimizer = chainermn.create_multi_node_optimizer(
    ...     chainer.optimizers.SGD(), comm, compression=chainermn.compression.Quantization(bits=8)
    ... )

    References
    ----------
    Seide et al.: 1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs, 2014 (error feedback).

    Tang et al.: DoubleSqueeze, arXiv:1905.05957, 2019 (error feedback for both roundings).
    """

    bits: int = 8
    block: int = 256
    min_size: int = 4096

    remembers: ClassVar[tuple[str, ...]] = ("error",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (8, 16):
            raise ValueError(f"Quantization: bits must be 8 or 16, got {self.bits!r}")
        self._check("block", 8)
        self._check("min_size", 1)

    @override
    def compresses(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) >= self.min_size

    @override
    def exchange(self, tensors: Sequence[Tensor], collectives: Collectives, step: int) -> Exchange:
        size, rank = collectives.size, collectives.rank
        wire = _Wire(self, [tensor.memory for tensor in tensors], size)
        errors = [t.memory.add("error", t.gradient) for t in tensors]
        received = yield from collectives.alltoall(wire.encode(errors, size))
        shards = [_mean(wire.of_all(received, k), t.memory) for k, t in enumerate(tensors)]
        message = wire.encode(shards, 1)
        for error, lost in zip(errors, shards, strict=True):
            # The mean lacks this on all ranks, so it counts once per rank here.
            shard = error[rank * lost.size : (rank + 1) * lost.size]
            shard += lost[: shard.size] * size
        means = yield from collectives.allgather(message[0])
        parts = [wire.of_all(means, k) for k in range(len(tensors))]
        writes = [
            partial(_write, [_placed(part, tensor.memory) for part in of_all])
            for tensor, of_all in zip(tensors, parts, strict=True)
        ]
        is_finite = all(np.isfinite(part.scales).all() for of_all in parts for part in of_all)
        return Means(writes, is_finite)


class _Encoded(NamedTuple):
    """A shard of a tensor."""

    codes: Array  # of shape (number of blocks, elements of a block)
    scales: Array  # of shape (number of blocks,)


class _Wire:
    """The layout of a message: the shard of each tensor, codes before scales."""

    def __init__(self, settings: Quantization, memories: Sequence[Memory], n_ranks: int) -> None:
        self._dtype = np.dtype(f"int{settings.bits}")
        self._block = settings.block
        self._n_blocks = [-(-m.size // (settings.block * n_ranks)) for m in memories]

    def encode(self, arrays: Sequence[Array], n_shards: int) -> Array:
        """Return a row of bytes for each shard; the rounding errors stay in the arrays."""
        parts = []
        for array, n_blocks in zip(arrays, self._n_blocks, strict=True):
            encoded = self._encode(array, n_blocks * n_shards)
            parts += [part.reshape(n_shards, -1).view(np.uint8) for part in encoded]
        return get_array_module(parts[0]).concatenate(parts, axis=1)

    def of_all(self, rows: Array, index: int) -> list[_Encoded]:
        """Return the part of a tensor in each row."""
        per_block = self._block * self._dtype.itemsize + 4
        start = sum(self._n_blocks[:index]) * per_block
        n_blocks = self._n_blocks[index]
        middle = start + n_blocks * self._block * self._dtype.itemsize
        return [
            _Encoded(
                row[start:middle].view(self._dtype).reshape(n_blocks, -1),
                row[middle : start + n_blocks * per_block].view(np.float32),
            )
            for row in rows
        ]

    def _encode(self, array: Array, n_blocks: int) -> _Encoded:
        xp, block = get_array_module(array), self._block
        codes = xp.zeros_like(array, self._dtype, shape=(n_blocks, block))
        scales = xp.zeros_like(array, np.float32, shape=n_blocks)
        n_full = array.size // block
        full = array[: n_full * block].reshape(n_full, block)
        rows = n_full if on_gpu(array) else max(1, _CHUNK // block)
        for start in range(0, n_full, max(1, rows)):
            part = slice(start, min(start + rows, n_full))
            _encode(full[part], codes[part], scales[part])
        if rest := array.size - n_full * block:
            last = xp.zeros_like(array, shape=(1, block))
            last[0, :rest] = array[n_full * block :]
            _encode(last, codes[n_full : n_full + 1], scales[n_full : n_full + 1])
            array[n_full * block :] = last[0, :rest]
        return _Encoded(codes, scales)


def _encode(values: Array, codes: Array, scales: Array) -> None:
    """Round blocks to integers times their scales, and leave the errors in ``values``."""
    xp = get_array_module(values)
    largest = xp.maximum(values.max(axis=1), -values.min(axis=1)).astype(np.float32)
    limit = np.float32(np.iinfo(codes.dtype).max)
    # Numbers too small to divide by become zero, but not NaN.
    is_tiny = largest <= limit * np.finfo(np.float32).tiny
    scales[...] = xp.where(is_tiny, 0, largest / limit)
    inverse = xp.where(is_tiny, 0, 1 / xp.where(is_tiny, 1, scales).astype(values.dtype))
    rounded = xp.multiply(values, inverse[:, None])
    xp.rint(rounded, out=rounded)
    codes[...] = rounded.astype(codes.dtype)
    rounded *= scales[:, None]
    values -= rounded


def _mean(parts: Sequence[_Encoded], memory: Memory) -> Array:
    """Return the mean of a shard over all ranks, added up in the order of the ranks."""
    placed = [_placed(part, memory) for part in parts]
    total = memory.zeros(placed[0].codes.size)
    _write(placed[:1], total)
    addend = memory.zeros(total.size)
    for part in placed[1:]:
        _write([part], addend)
        total += addend
    total /= len(parts)
    return total


def _placed(part: _Encoded, memory: Memory) -> _Encoded:
    return _Encoded(*map(memory.place, part))


def _write(shards: Sequence[_Encoded], out: Array) -> None:
    """Fill ``out`` with decoded shards, one after another."""
    xp = get_array_module(out)
    start = 0
    for codes, scales in shards:
        part = out[start : start + codes.size]
        n_full = part.size // codes.shape[1]
        full = part[: n_full * codes.shape[1]].reshape(n_full, -1) if n_full else part[:0]
        if n_full:
            xp.multiply(codes[:n_full], scales[:n_full, None], out=full, dtype=out.dtype)
        rest = part[n_full * codes.shape[1] :]
        if rest.size:
            xp.multiply(codes[n_full, : rest.size], scales[n_full], out=rest, dtype=out.dtype)
        start += codes.size
