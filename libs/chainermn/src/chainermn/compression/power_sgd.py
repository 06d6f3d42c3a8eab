"""PowerSGD: each gradient matrix is sent as the product of two thin ones."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from chainer.backend import get_array_module
from typing_extensions import override

from chainermn.compression.compression import Compression, Exchange, Means, Tensor
from chainermn.transport.collectives import Collectives
from chainermn.transport.gpu.device import on_gpu
from chainermn.transport.reducer import Array, Pending, padded_length

# A block of rows stays in the second-level cache while it is used several times. It is so small
# that BLAS multiplies it by a thin matrix without copying it first, which halves the time.
_BLOCK_BYTES = 1 << 18
#: This many bytes of totals are subtracted from while a message is being sent. With more, the
#: message would arrive earlier, and subtracting in the next step is faster.
SUBTRACTED_BYTES = 8 << 20
# A column depends on others if less than this fraction of its length remains.
_DEPENDENT = 1e-6
# Rows of the matrices that show how BLAS rounds, also at the ends of its blocks.
_ROWS = 515


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """Compression that approximates each gradient by a matrix of low rank.

    A gradient of shape ``(n, ...)`` counts as a matrix with ``n`` rows. The error of the
    approximation is added to the gradient of the next step (error feedback). The power iteration
    that finds the approximation continues from the previous step (warm start). Gradients with one
    dimension are not compressed, nor are those that would hardly become smaller.

    Parameters
    ----------
    rank : int
        Rank of the approximations. An ``n`` by ``m`` matrix becomes ``rank * (n + m)`` numbers.
    min_ratio : float
        Smallest compression ratio for which a gradient is compressed.
    start_iteration : int
        Number of steps without compression at the start.

    Notes
    -----
    Each rank needs memory for one more copy of the gradients, or for two with overlap or loss
    scaling.

    Examples
    --------
    >>> optimizer = chainermn.create_multi_node_optimizer(
    ...     chainer.optimizers.SGD(), comm, compression=chainermn.compression.PowerSGD(rank=4)
    ... )

    References
    ----------
    Vogels, Karimireddy and Jaggi: PowerSGD: Practical low-rank gradient compression for
    distributed optimization, arXiv:1905.13727, 2019.
    """

    rank: int = 4
    min_ratio: float = 2.0

    remembers: ClassVar[tuple[str, ...]] = ("total", "left", "own", "right")
    takes_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("rank", 1)
        self._check("min_ratio", 1, None, float)

    @override
    def arithmetic(self) -> bytes:
        """Multiply two matrices; BLAS may round the product differently on other processors."""
        left = random_matrix("left", (_ROWS, self.rank)).astype(np.float32)
        right = random_matrix("right", (self.rank, _ROWS)).astype(np.float32)
        product = np.empty(_ROWS**2, np.float32)
        _write_product(left, right, product)
        return hashlib.blake2b(product.tobytes()).digest()

    @override
    def compresses(self, shape: tuple[int, ...]) -> bool:
        n, m = _matrix_shape(shape)
        return len(shape) > 1 and n * m >= self.min_ratio * self._rank_of(n, m) * (n + m) > 0

    @override
    def exchange(self, tensors: Sequence[Tensor], collectives: Collectives, step: int) -> Exchange:
        matrices = [self._matrix_of(t) for t in tensors if self.compresses(t.memory.shape)]
        exact = [tensor for tensor in tensors if not self.compresses(tensor.memory.shape)]
        shapes = [matrix.left_shape for matrix in matrices] + [(t.memory.size,) for t in exact]
        message, parts = _message(shapes, tensors, collectives)
        lefts, means = parts[: len(matrices)], parts[len(matrices) :]
        for matrix, left in zip(matrices, lefts, strict=True):
            matrix.add_up(left)
        for tensor, mean in zip(exact, means, strict=True):
            mean[...] = tensor.gradient
        yield from collectives.mean(message)
        is_finite = get_array_module(message).isfinite(message).all()
        write = {t.name: partial(_write, mean) for t, mean in zip(exact, means, strict=True)}
        if matrices:
            rights, are_finite = yield from _average_rights(matrices, lefts, collectives)
            is_finite &= are_finite
            for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                matrix.remember_start(right)
                write[matrix.tensor.name] = partial(_write_product, left, right)
        return Means([write[tensor.name] for tensor in tensors], is_finite)

    def _matrix_of(self, tensor: Tensor) -> _Matrix:
        name, _, memory = tensor
        n, m = _matrix_shape(memory.shape)
        right = memory.arrays.get("right")
        if right is None:
            shape = self._rank_of(n, m), m
            right = memory.place(random_matrix(name, shape).astype(memory.dtype))
        return _Matrix(tensor, right, memory.next("total").reshape(n, m))

    def _rank_of(self, n: int, m: int) -> int:
        return min(self.rank, n, m)


class _Matrix(NamedTuple):
    """A gradient as a matrix.

    The error of a step is its total minus the product that has been sent, and the total of the
    next step starts with it. The product may be subtracted only then, block by block,
    while each block is in the cache for what follows.
    """

    tensor: Tensor
    right: Array  # of shape (rank, number of columns)
    total: Array  # of the gradient and of what has been left out; set by `add_up`

    @property
    def left_shape(self) -> tuple[int, int]:
        return len(self.total), len(self.right)

    def add_up(self, left: Array) -> None:
        """Set the total, and ``left`` to its product with the transpose of ``right``."""
        shape, memory = self.total.shape, self.tensor.memory
        arrays, factor = memory.arrays, memory.factor
        gradient = self.tensor.gradient.reshape(shape)
        before = arrays["total"].reshape(shape) if "total" in arrays else None
        xp = get_array_module(left)
        for rows in _blocks(self.total):
            block = self.total[rows]
            if before is None:
                block[...] = gradient[rows]
            elif "left" not in arrays and factor == 1:
                xp.add(before[rows], gradient[rows], out=block)
            else:
                product = _product(arrays["left"][rows], arrays["own"]) if "left" in arrays else 0
                xp.subtract(before[rows], product, out=block)
                block *= factor
                block += gradient[rows]
            xp.matmul(block, self.right.T, out=left[rows])

    def remember_sent(self, left: Array, own: Array, subtract: bool) -> None:
        """Subtract the product that this rank has sent, or keep it to do so in the next step."""
        if subtract:
            for rows in _blocks(self.total):
                self.total[rows] -= _product(left[rows], own)
        else:
            self.tensor.memory.set("left", left)
            self.tensor.memory.set("own", own)

    def remember_start(self, mean: Array) -> None:
        """Keep the start of the next power iteration."""
        memory = self.tensor.memory
        initial = memory.place(random_matrix(self.tensor.name, mean.shape))
        memory.set("right", _warm_start(mean, initial))


def _average_rights(
    matrices: Sequence[_Matrix], lefts: Sequence[Array], collectives: Collectives
) -> Generator[Pending, None, tuple[list[Array], Array]]:
    """Make mean left factors orthonormal; return mean right ones, and whether all are finite."""
    shapes = [matrix.right.shape for matrix in matrices]
    message, rights = _message(shapes, [matrix.tensor for matrix in matrices], collectives)
    for matrix, left, right in zip(matrices, lefts, rights, strict=True):
        _orthonormalize(left)
        for rows in _blocks(matrix.total):
            right += left[rows].T @ matrix.total[rows]
    owns = _parts(message.copy(), shapes)
    steps = collectives.mean(message)
    under_way = next(steps, None)
    n_bytes = 0
    for matrix, left, own in zip(matrices, lefts, owns, strict=True):
        n_bytes += matrix.total.nbytes
        matrix.remember_sent(left, own, subtract=n_bytes <= SUBTRACTED_BYTES)
    if under_way is not None:
        yield under_way
        yield from steps
    return rights, get_array_module(message).isfinite(message).all()


def _message(
    shapes: Sequence[tuple[int, ...]], tensors: Sequence[Tensor], collectives: Collectives
) -> tuple[Array, list[Array]]:
    """Return a buffer for `Collectives.mean`, and its parts as arrays of these shapes."""
    length = sum(map(math.prod, shapes))
    buffer = tensors[0].memory.zeros(padded_length(length, collectives.size))
    return buffer, _parts(buffer, shapes)


def _parts(buffer: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    ends = itertools.accumulate(map(math.prod, shapes))
    return [
        buffer[end - math.prod(shape) : end].reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


@functools.lru_cache(1024)
def random_matrix(name: str, shape: tuple[int, ...]) -> Array:
    """Return a matrix of random numbers, the same on all ranks for the same name."""
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)


def _blocks(matrix: Array) -> Iterator[slice]:
    """Divide the rows of a matrix in host memory into blocks."""
    rows = len(matrix)
    if not on_gpu(matrix):
        rows = max(1, _BLOCK_BYTES // max(1, matrix.shape[1] * matrix.itemsize))
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def _orthonormalize(left: Array) -> None:
    """Make columns orthogonal and of length 1, by the modified Gram-Schmidt process.

    A column that depends on those before it becomes zero. Divided by its tiny length, its
    rounding errors would point in any direction.
    """
    xp = get_array_module(left)
    columns = xp.ascontiguousarray(left.T, np.float64)
    before = _length(columns)
    for index, column in enumerate(columns):
        length = _length(column)
        is_dependent = length <= _DEPENDENT * before[index]
        column *= xp.where(is_dependent, 0, 1) / xp.where(length == 0, 1, length)
        if len(others := columns[index + 1 :]):
            others -= (others * column).sum(-1)[:, None] * column
    left[...] = columns.T


def _length(vector: Array) -> Array:
    return get_array_module(vector).sqrt((vector * vector).sum(-1))


def _warm_start(right: Array, initial: Array) -> Array:
    """Return the rows scaled to length 1. Initial rows replace rows of zeros."""
    rows = right.astype(np.float64)
    length = _length(rows)[:, None]
    if (length == 0).any():
        rows = get_array_module(right).where(length == 0, initial, rows)
        length = _length(rows)[:, None]
    rows /= length
    return rows.astype(right.dtype)


def _write(mean: Array, out: Array) -> None:
    out[...] = mean


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
