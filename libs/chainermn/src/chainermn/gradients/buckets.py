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

    def exchange(self, parameters: Sequence[chainer.Parameter]) -> Iterator[Array]:
        """Yield one buffer after the other; what the caller puts into it becomes the gradients.

        Parameters
        ----------
        parameters : sequence of chainer.Parameter
            With gradients; the same, in the same order, on all ranks.

        Yields
        ------
        ndarray of shape (n,)
            The gradients of a bucket, one behind the other. A gradient that is alone in its
            bucket is not copied but yielded itself, if it is contiguous.
        """
        make_exclusive(parameters)
        for bucket in self.divide(parameters):
            gradients = [parameter.grad for parameter in bucket]
            if len(gradients) == 1 and gradients[0].flags.c_contiguous:
                yield gradients[0].reshape(-1)
                continue
            buffer = self._buffer(sum(gradient.size for gradient in gradients), bucket[0].dtype)
            np.concatenate([gradient.reshape(-1) for gradient in gradients], out=buffer)
            yield buffer
            offset = 0
            for gradient in gradients:
                part = buffer[offset : offset + gradient.size]
                gradient[...] = part.reshape(gradient.shape)
                offset += gradient.size

    def divide(self, parameters: Sequence[chainer.Parameter]) -> list[list[chainer.Parameter]]:
        """Return buckets of parameters of one dtype each, in about the given order."""
        buckets: list[list[chainer.Parameter]] = []
        filling: dict[np.dtype[Any], tuple[list[chainer.Parameter], int]] = {}
        for parameter in parameters:
            array = parameter.array
            bucket, filled = filling.get(array.dtype, ([], 0))
            if array.nbytes >= self._limit:
                buckets.append([parameter])
                continue
            if filled + array.nbytes > self._limit:
                bucket, filled = [], 0
            if not bucket:
                buckets.append(bucket)
            bucket.append(parameter)
            filling[array.dtype] = bucket, filled + array.nbytes
        return buckets

    def _buffer(self, n: int, dtype: np.dtype[Any]) -> Array:
        if dtype not in self._memory or self._memory[dtype].size < n:
            self._memory[dtype] = np.empty(n, dtype)
        return self._memory[dtype][:n]


def make_exclusive(parameters: Sequence[chainer.Parameter]) -> None:
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
