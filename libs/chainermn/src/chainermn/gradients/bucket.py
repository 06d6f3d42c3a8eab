"""Gradients that are exchanged together: a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from chainermn.channels_last import as_shaped, as_stored, is_channels_last
from chainermn.gradients.batched_copy import BatchedCopy
from chainermn.transport.collectives import Collectives
from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.reducer import Array, Steps, padded_length

if TYPE_CHECKING:
    import chainer


class Bucket(Protocol):
    """Gradients that are exchanged together.

    Attributes
    ----------
    members : sequence of int
        Positions of the parameters among all parameters.
    on_gpu : bool
        Whether the gradients are in GPU memory.
    """

    members: Sequence[int]
    on_gpu: bool

    def gather(self, gradients: Sequence[Array]) -> None:
        """Take one-dimensional contiguous gradients, which must not change until `scatter`."""

    def exchange(self, collectives: Collectives) -> Steps:
        """Average the gradients over the ranks."""

    def scatter(self, gradients: Sequence[Array]) -> None:
        """Write the means into the gradients."""


#: The largest buffer so far, by dtype and whether it is in GPU memory. Buckets share buffers if
#: only one bucket is in use at a time.
Buffers: TypeAlias = dict[tuple[np.dtype[Any], bool], Array]


class DenseBucket:
    """A bucket whose gradients are averaged in one buffer, in host memory or in GPU memory.

    In GPU memory, one kernel per dtype copies in each direction, and the host does not wait for
    it. The gradients may have different dtypes: all are cast to the dtype of the buffer. The
    length of the buffer is a multiple of the number of ranks, so that all shards are equally long.

    Parameters
    ----------
    members : sequence of int
        Positions of the parameters among all parameters.
    parameters : sequence of chainer.Parameter
        Parameters of the gradients: all in host memory with the same dtype, or all in GPU memory.
    dtype : dtype
        Dtype of the buffer.
    n_ranks : int
        Number of ranks.
    buffers : Buffers or None
        Buffers shared with other buckets. With these, a single gradient in host memory is its own
        buffer, without a copy. None gives the bucket a private buffer.

    Attributes
    ----------
    buffer : array of shape (n,)
        Elements of the gradients, in the order of ``members``, in GPU memory with some zeros in
        between. Set by `gather`.
    """

    buffer: Array

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[chainer.Parameter],
        dtype: np.dtype[Any],
        n_ranks: int,
        buffers: Buffers | None,
    ) -> None:
        self.members = members
        self.on_gpu = on_gpu(parameters[0].array)
        self._dtype = dtype
        self._n_ranks = n_ranks
        self._buffers = {} if buffers is None else buffers
        self._is_in_place = buffers is not None and len(members) == 1 and not self.on_gpu
        sizes = [parameter.size for parameter in parameters]
        self._length = sum(sizes)
        if self.on_gpu:
            dtypes = [parameter.dtype for parameter in parameters]
            self._copy = BatchedCopy(the_gpu(), sizes, dtypes, dtype)
            self._length = padded_length(self._copy.length, n_ranks)

    def gather(self, gradients: Sequence[Array]) -> None:
        """Copy one-dimensional contiguous gradients into the buffer."""
        if self._is_in_place:
            (self.buffer,) = gradients
            return
        self.buffer = self._take_buffer()
        if self.on_gpu:
            self._copy.gather(gradients, self.buffer)
        else:
            np.concatenate(gradients, out=self.buffer)

    def exchange(self, collectives: Collectives) -> Steps:
        """Average the buffer over the ranks; in GPU memory, only sum it."""
        # In GPU memory, the kernels divide when scattering.
        return (collectives.sum if self.on_gpu else collectives.mean)(self.buffer)

    def scatter(self, gradients: Sequence[Array]) -> None:
        """Copy the means from the buffer into the gradients; in GPU memory, divide the sums."""
        if self.on_gpu:
            self._copy.scatter(self.buffer, gradients, self._n_ranks)
        elif not self._is_in_place:
            start = 0
            for gradient in gradients:
                gradient[:] = self.buffer[start : start + gradient.size]
                start += gradient.size

    def _take_buffer(self) -> Array:
        key = self._dtype, self.on_gpu
        if key not in self._buffers or self._buffers[key].size < self._length:
            # In GPU memory, the padding is reduced with the gradients and must not overflow.
            new = gpu_zeros if self.on_gpu else np.empty
            self._buffers[key] = new(self._length, self._dtype)
        return self._buffers[key][: self._length]


def gpu_zeros(n: int, dtype: np.dtype[Any]) -> Array:
    """Return ``n`` zeros in GPU memory."""
    zeros = the_gpu().empty(n, dtype)
    zeros.view(np.uint8)[...] = 0
    return zeros


def flat_gradients(parameters: Sequence[chainer.Parameter]) -> list[Array]:
    """Give each parameter its own writable gradient, laid as it is; return flat views of memory.

    The backward of an addition passes the same array to both operands, so that reducing in place
    would reduce it twice. The backward of a broadcast passes a read-only view of fewer elements.
    """
    owners: set[int] = set()
    flat = []
    for parameter in parameters:
        is_last = is_channels_last(parameter.array)
        stored = as_stored(parameter.grad, is_last)
        owner = _owner(stored)
        flags = stored.flags
        is_usable = flags.c_contiguous and getattr(flags, "writeable", True)  # CuPy has no flag
        if id(owner) in owners or not is_usable:
            owner = stored = stored.copy(order="C")
            parameter.grad = as_shaped(stored, is_last)
        owners.add(id(owner))
        flat.append(stored.reshape(-1))
    return flat


def _owner(array: Any) -> Any:
    while isinstance(base := getattr(array, "base", None), np.ndarray | type(array)):
        array = base
    return array
