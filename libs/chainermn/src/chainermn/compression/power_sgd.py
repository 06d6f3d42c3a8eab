"""PowerSGD: each gradient matrix is sent as the product of two thin ones."""

from __future__ import annotations

import functools
import hashlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from chainer.backend import get_array_module
from typing_extensions import override

from chainermn.compression.compression import Compression, Exchange, Means, Tensor
from chainermn.transport.collectives import Collectives
from chainermn.transport.gpu.device import on_gpu
from chainermn.transport.reducer import Array, padded_length

# A block of rows stays in the second-level cache while it is used several times, and is so small
# that BLAS multiplies it by a thin matrix without copying it first, which takes half the time.
_BLOCK_BYTES = 1 << 18
# A column depends on others if this is left of its length.
_DEPENDENT = 1e-6
# Of the matrices that show how BLAS rounds, also where its blocks end.
_ROWS = 515


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """Approximates each gradient by a matrix of low rank (Vogels et al., arXiv:1905.13727, 2019).

    A gradient of shape ``(n, ...)`` is taken for a matrix of ``n`` rows. What the approximation
    leaves out is added to the gradient of the next step (error feedback), and the power iteration
    that finds the approximation goes on from that of the step before (warm start). Gradients with
    one dimension are sent as they are, and so are those that would not become much smaller.

    Parameters
    ----------
    rank : int
        Rank of the approximations. An ``n`` by ``m`` matrix becomes ``rank * (n + m)`` numbers.
    min_ratio : float
        A gradient is compressed if that makes it at least so many times smaller.
    start_iteration : int
        See `Compression`.

    Notes
    -----
    Each rank needs memory for two more copies of the gradients.
    """

    rank: int = 4
    min_ratio: float = 2.0

    remembers: ClassVar[tuple[str, ...]] = ("error", "right")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("rank", 1)
        self._check("min_ratio", 1, None, float)

    @override
    def arithmetic(self) -> bytes:
        """Multiply two matrices as for a mean: BLAS may round differently on another processor."""
        left = _random("left", (_ROWS, self.rank)).astype(np.float32)
        right = _random("right", (self.rank, _ROWS)).astype(np.float32)
        product = np.empty(_ROWS**2, np.float32)
        _write_product(left, right, product)
        return hashlib.blake2b(product.tobytes()).digest()

    @override
    def compresses(self, shape: tuple[int, ...]) -> bool:
        n, m = _matrix_shape(shape)
        return len(shape) > 1 and n * m >= self.min_ratio * self._rank_of(n, m) * (n + m) > 0

    @override
    def exchange(self, tensors: Sequence[Tensor], collectives: Collectives, step: int) -> Exchange:
        matrices = [self._begin(tensor) for tensor in tensors]
        lefts = _Parts([(len(m.values), len(m.right)) for m in matrices], tensors, collectives)
        for matrix, left in zip(matrices, lefts, strict=True):
            _project(matrix.values, matrix.right, left)
        yield from collectives.mean(lefts.buffer)
        rights = _Parts([m.right.shape for m in matrices], tensors, collectives)
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            _orthonormalise(left)
            _project_transposed(matrix.values, left, right)
        own = rights.buffer.copy()
        steps = collectives.mean(rights.buffer)
        # The errors are computed while the first message is under way.
        first = next(steps, None)
        for matrix, left, right in zip(matrices, lefts, rights.parts_of(own), strict=True):
            _subtract_product(matrix.values, left, right)
        if first is not None:
            yield first
            yield from steps
        for tensor, right in zip(tensors, rights, strict=True):
            initial = tensor.memory.place(_random(tensor.name, right.shape))
            tensor.memory.set("right", _warm_start(right, initial))
        xp = get_array_module(rights.buffer)
        is_finite = xp.isfinite(lefts.buffer).all() & xp.isfinite(rights.buffer).all()
        pairs = zip(lefts, rights, strict=True)
        return Means([partial(_write_product, left, right) for left, right in pairs], is_finite)

    def _begin(self, tensor: Tensor) -> _Matrix:
        name, gradient, loss_scale, memory = tensor
        n, m = _matrix_shape(memory.shape)
        rank = self._rank_of(n, m)
        right = memory.arrays.get("right")
        if right is None:
            right = memory.place(_random(name, (rank, m)).astype(memory.dtype))
        return _Matrix(memory.add("error", gradient, loss_scale).reshape(n, m), right)

    def _rank_of(self, n: int, m: int) -> int:
        return min(self.rank, n, m)


class _Matrix(NamedTuple):
    values: Array  # gradient and error; at last the next error
    right: Array  # of shape (rank, number of columns)


class _Parts:
    """Matrices that are parts of one buffer, which is padded for `Collectives.mean`."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        tensors: Sequence[Tensor],
        collectives: Collectives,
    ) -> None:
        self._shapes = shapes
        length = sum(map(math.prod, shapes))
        self.buffer = tensors[0].memory.zeros(padded_length(length, collectives.size))

    def __iter__(self) -> Iterator[Array]:
        return self.parts_of(self.buffer)

    def parts_of(self, buffer: Array) -> Iterator[Array]:
        start = 0
        for shape in self._shapes:
            end = start + math.prod(shape)
            yield buffer[start:end].reshape(shape)
            start = end


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


@functools.lru_cache(1024)
def _random(name: str, shape: tuple[int, ...]) -> Array:
    """Return random numbers that are the same on all ranks."""
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)


def _blocks(matrix: Array) -> Iterator[slice]:
    """Divide the rows of a matrix in host memory into blocks."""
    rows = len(matrix)
    if not on_gpu(matrix):
        rows = max(1, _BLOCK_BYTES // max(1, matrix.shape[1] * matrix.itemsize))
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def _project(matrix: Array, right: Array, out: Array) -> None:
    """Set ``out`` to the product of a matrix and the transpose of ``right``."""
    xp = get_array_module(matrix)
    for rows in _blocks(matrix):
        xp.matmul(matrix[rows], right.T, out=out[rows])


def _project_transposed(matrix: Array, left: Array, out: Array) -> None:
    """Add to ``out`` the product of the transpose of ``left`` and a matrix."""
    for rows in _blocks(matrix):
        out += left[rows].T @ matrix[rows]


def _orthonormalise(left: Array) -> None:
    """Make columns orthogonal and of length 1, by the modified Gram-Schmidt process.

    A column that depends on those before it becomes zero: divided by its tiny length, rounding
    errors would point anywhere.
    """
    xp = get_array_module(left)
    columns = xp.ascontiguousarray(left.T, np.float64)
    for index, column in enumerate(columns):
        before = _length(column)
        for other in columns[:index]:
            column -= (column * other).sum() * other
        length = _length(column)
        column *= xp.where(length <= _DEPENDENT * before, 0, 1) / xp.where(length == 0, 1, length)
    left[...] = columns.T


def _length(vector: Array) -> Array:
    return get_array_module(vector).sqrt((vector * vector).sum(-1))


def _warm_start(right: Array, initial: Array) -> Array:
    """Return the rows with a length of 1. Initial rows replace those that are zero."""
    rows = right.astype(np.float64)
    rows = get_array_module(right).where(_length(rows)[:, None] == 0, initial, rows)
    rows /= _length(rows)[:, None]
    return rows.astype(right.dtype)


def _subtract_product(matrix: Array, left: Array, right: Array) -> None:
    """Subtract the product of ``left`` and ``right``."""
    for rows in _blocks(matrix):
        matrix[rows] -= _product(left[rows], right)


def _write_product(left: Array, right: Array, out: Array) -> None:
    """Set the elements of ``out`` to those of the product of ``left`` and ``right``."""
    matrix = out.reshape(len(left), -1)
    for rows in _blocks(matrix):
        _product(left[rows], right, matrix[rows])


def _product(left: Array, right: Array, out: Array | None = None) -> Array:
    xp = get_array_module(left)
    if len(right) == 1:  # which BLAS computes slowly
        return xp.multiply(left, right, out=out)
    return xp.matmul(left, right, out=out)
