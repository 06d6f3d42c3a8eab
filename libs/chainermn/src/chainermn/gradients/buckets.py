"""Gradients gathered into contiguous buffers, and handed back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import chainer

Array = NDArray[Any]


class Buckets:
    """Divides gradients into buckets and keeps the memory for them.

    Parameters
    ----------
    limit : float
        Bytes a bucket may have. A gradient larger than that has a bucket of its own; with 0
        every one has.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._memory: dict[np.dtype[Any], Array] = {}

    def exchange(
        self, parameters: Sequence[chainer.Parameter], wire_dtype: np.dtype[Any] | None
    ) -> Iterator[Array]:
        """Yield one buffer after the other; what the caller puts into it becomes the gradients.

        Parameters
        ----------
        parameters : sequence of chainer.Parameter
            With gradients; the same, in the same order, on all ranks.
        wire_dtype : dtype, optional
            Of the buffers; that of the gradients by default.

        Yields
        ------
        ndarray of shape (n,)
            The gradients of a bucket, one behind the other. A gradient that is alone in its
            bucket is not copied but yielded itself.
        """
        _make_exclusive(parameters)
        for dtype, bucket in self._divide(parameters, wire_dtype):
            gradients = [parameter.grad for parameter in bucket]
            only = gradients[0]
            if len(gradients) == 1 and only.dtype == dtype and only.flags.c_contiguous:
                yield only.reshape(-1)
                continue
            buffer = self._buffer(sum(gradient.size for gradient in gradients), dtype)
            for part, gradient in _parts(buffer, gradients):
                part[...] = gradient
            yield buffer
            for part, gradient in _parts(buffer, gradients):
                gradient[...] = part

    def _divide(
        self, parameters: Sequence[chainer.Parameter], wire_dtype: np.dtype[Any] | None
    ) -> Iterator[tuple[np.dtype[Any], list[chainer.Parameter]]]:
        open_buckets: dict[np.dtype[Any], list[chainer.Parameter]] = {}
        filled: dict[np.dtype[Any], int] = {}
        for parameter in parameters:
            dtype = wire_dtype or parameter.grad.dtype
            n_bytes = parameter.grad.size * dtype.itemsize
            bucket = open_buckets.setdefault(dtype, [])
            if bucket and filled[dtype] + n_bytes > self._limit:
                yield dtype, bucket
                bucket = open_buckets[dtype] = []
            filled[dtype] = n_bytes + (filled[dtype] if bucket else 0)
            bucket.append(parameter)
        yield from open_buckets.items()

    def _buffer(self, n: int, dtype: np.dtype[Any]) -> Array:
        if dtype not in self._memory or self._memory[dtype].size < n:
            self._memory[dtype] = np.empty(n, dtype)
        return self._memory[dtype][:n]


def _parts(buffer: Array, gradients: Sequence[Array]) -> Iterator[tuple[Array, Array]]:
    offset = 0
    for gradient in gradients:
        yield buffer[offset : offset + gradient.size].reshape(gradient.shape), gradient
        offset += gradient.size


def _make_exclusive(parameters: Sequence[chainer.Parameter]) -> None:
    """Give each parameter a gradient array of its own that can be written to.

    The backward of an addition hands the very same array to both sides, that of a broadcast a
    read-only view; reduced in place, the former would be reduced twice.
    """
    owners: set[int] = set()
    for parameter in parameters:
        owner = _owner(parameter.grad)
        if id(owner) in owners or not parameter.grad.flags.writeable:
            parameter.grad = parameter.grad.copy()
            owner = parameter.grad
        owners.add(id(owner))


def _owner(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
