"""Copies of gradients into the buffer of a bucket and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from chainermn.gradients.batched_copy import BatchedCopy, Layout
from chainermn.transport.gpu.device import Gpu
from chainermn.transport.reducer import Array


class Copies(ABC):
    """Copies between gradients and a buffer that holds them consecutively.

    Attributes
    ----------
    length : int
        Number of elements of the buffer.
    dtype : dtype
        Dtype of the buffer.
    """

    length: int
    dtype: np.dtype[Any]

    @abstractmethod
    def new_buffer(self) -> Array:
        """Allocate a buffer."""

    @abstractmethod
    def gather(self, gradients: Sequence[Array], buffer: Array) -> None:
        """Copy one-dimensional contiguous gradients into the buffer."""

    @abstractmethod
    def scatter(self, buffer: Array, gradients: Sequence[Array]) -> None:
        """Copy the buffer back into one-dimensional contiguous gradients."""


class HostCopies(Copies):
    """Copies in host memory, for gradients of one dtype.

    Parameters
    ----------
    sizes : sequence of int
        Number of elements of each gradient.
    dtype : dtype
        Dtype of the gradients and of the buffer.
    """

    def __init__(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> None:
        ends = np.cumsum(sizes).tolist()
        self._parts = [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]
        self.length = sum(sizes)
        self.dtype = dtype

    @override
    def new_buffer(self) -> Array:
        return np.empty(self.length, self.dtype)

    @override
    def gather(self, gradients: Sequence[Array], buffer: Array) -> None:
        np.concatenate(gradients, out=buffer)

    @override
    def scatter(self, buffer: Array, gradients: Sequence[Array]) -> None:
        for part, gradient in zip(self._parts, gradients, strict=True):
            gradient[:] = buffer[part]


class GpuCopies(Copies):
    """Copies in GPU memory, by one kernel in each direction. The host does not wait for them.

    `scatter` also divides by the number of ranks. Gradients may have different dtypes; all are
    cast to the dtype of the buffer.

    Parameters
    ----------
    gpu : Gpu
    sizes : sequence of int
        Number of elements of each gradient.
    dtypes : sequence of dtype
        Dtype of each gradient.
    dtype : dtype
        Dtype of the buffer.
    n_ranks : int
        Number of ranks. The length of the buffer is a multiple of it, so that all shards have the
        same length.
    """

    def __init__(
        self,
        gpu: Gpu,
        sizes: Sequence[int],
        dtypes: Sequence[np.dtype[Any]],
        dtype: np.dtype[Any],
        n_ranks: int,
    ) -> None:
        self._gpu = gpu
        self._n_ranks = n_ranks
        self._batched = BatchedCopy(gpu, Layout(sizes, dtypes), dtype)
        self.length = padded_length(sum(sizes), n_ranks)
        self.dtype = dtype

    @override
    def new_buffer(self) -> Array:
        # The padding behind the gradients is reduced along with them and must not overflow.
        return gpu_zeros(self._gpu, self.length, self.dtype)

    @override
    def gather(self, gradients: Sequence[Array], buffer: Array) -> None:
        self._batched.gather(gradients, buffer)

    @override
    def scatter(self, buffer: Array, gradients: Sequence[Array]) -> None:
        self._batched.scatter(buffer, gradients, self._n_ranks)


def padded_length(n: int, n_ranks: int) -> int:
    """Return the smallest multiple of ``n_ranks`` that is at least ``n``."""
    return -(-n // n_ranks) * n_ranks


def gpu_zeros(gpu: Gpu, n: int, dtype: np.dtype[Any]) -> Array:
    """Return ``n`` zeros in GPU memory."""
    zeros = gpu.empty(n, dtype)
    zeros.view(np.uint8)[...] = 0
    return zeros
