"""Gradients in GPU memory gathered into contiguous buffers, and handed back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chainermn.gradients.batched_copy import BatchedCopy, Layout

if TYPE_CHECKING:
    import chainer

    from chainermn.transport.gpu.device import Gpu

Array = NDArray[Any]

# Models trained in turn by one communicator; with another one, all is made anew.
_MOST_LAYOUTS = 512


class GpuBuckets:
    """Divides gradients into buckets and keeps the GPU memory for them.

    Parameters
    ----------
    gpu : Gpu
    size : int
        Number of ranks, of which the length of buffers is a multiple.
    one_each : bool
        Give every gradient a bucket of its own; by default all of one dtype on the wire share
        one.
    """

    def __init__(self, gpu: Gpu, size: int, one_each: bool) -> None:
        self._gpu = gpu
        self._size = size
        self._one_each = one_each
        self._copies: dict[tuple[Any, ...], BatchedCopy] = {}
        self._memory: dict[np.dtype[Any], Array] = {}

    def exchange(
        self, parameters: Sequence[chainer.Parameter], wire_dtype: np.dtype[Any] | None
    ) -> Iterator[Array]:
        """Yield one buffer after the other, into which the caller puts the sums over the ranks.

        These, divided by the number of ranks, become the gradients. Two kernels run for each
        buffer, and the host waits for nothing.

        Parameters
        ----------
        parameters : sequence of chainer.Parameter
            With gradients in GPU memory; the same, in the same order, on all ranks.
        wire_dtype : dtype or None
            Of the buffers; by default that of the gradients, each dtype in a buffer of its own.

        Yields
        ------
        array of shape (n,)
            The gradients of a bucket, one behind the other, and a few numbers without meaning.
        """
        make_contiguous(parameters)
        for bucket in self._divide(parameters, wire_dtype):
            gradients = [parameter.grad for parameter in bucket]
            dtype = wire_dtype or gradients[0].dtype
            buffer = self._buffer(sum(gradient.size for gradient in gradients), dtype)
            copy = self._copy_of(gradients, dtype)
            copy.gather(gradients, buffer)
            yield buffer
            copy.scatter(buffer, gradients, self._size)

    def _divide(
        self, parameters: Sequence[chainer.Parameter], wire_dtype: np.dtype[Any] | None
    ) -> list[list[chainer.Parameter]]:
        if self._one_each:
            return [[parameter] for parameter in parameters]
        buckets: dict[np.dtype[Any], list[chainer.Parameter]] = {}
        for parameter in parameters:
            buckets.setdefault(wire_dtype or parameter.dtype, []).append(parameter)
        return list(buckets.values())

    def _copy_of(self, gradients: Sequence[Array], dtype: np.dtype[Any]) -> BatchedCopy:
        key = (dtype, *((gradient.size, gradient.dtype) for gradient in gradients))
        if key not in self._copies:
            if len(self._copies) >= _MOST_LAYOUTS:
                self._copies.clear()
            sizes, dtypes = zip(*key[1:], strict=True)
            self._copies[key] = BatchedCopy(self._gpu, Layout(sizes, dtypes), dtype)
        return self._copies[key]

    def _buffer(self, n: int, dtype: np.dtype[Any]) -> Array:
        padded = padded_length(n, self._size)
        if dtype not in self._memory or self._memory[dtype].size < padded:
            self._memory[dtype] = gpu_zeros(self._gpu, padded, dtype)
        return self._memory[dtype][:padded]


def padded_length(n: int, size: int) -> int:
    """Return the length of a buffer for ``n`` elements that ``size`` ranks can divide evenly.

    What is behind the elements is added up with them, and must not overflow: zeros.
    """
    return -(-n // size) * size


def gpu_zeros(gpu: Gpu, n: int, dtype: np.dtype[Any]) -> Array:
    """Return ``n`` zeros in GPU memory."""
    zeros = gpu.empty(n, dtype)
    zeros.view(np.uint8)[...] = 0
    return zeros


def make_contiguous(parameters: Sequence[chainer.Parameter]) -> None:
    """Give each parameter a gradient array of its own, in one piece of memory.

    The backward of an addition hands the very same array to both sides, that of a broadcast a
    view of fewer elements.
    """
    owners: set[int] = set()
    for parameter in parameters:
        owner = _owner(parameter.grad)
        if id(owner) in owners or not parameter.grad.flags.c_contiguous:
            parameter.grad = parameter.grad.copy(order="C")
            owner = parameter.grad
        owners.add(id(owner))


def _owner(array: Any) -> Any:
    while isinstance(getattr(array, "base", None), type(array)):
        array = array.base
    return array
