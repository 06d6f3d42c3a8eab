"""Divide gradients into buckets, which are exchanged together in one buffer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from chainermn.gradients.batched_copy import BatchedCopy
from chainermn.gradients.embeddings import EmbeddingBucket
from chainermn.transport.collectives import Collectives
from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.reducer import Array, Steps, padded_length

if TYPE_CHECKING:
    import chainer
    from chainer.variable import VariableNode

    from chainermn.gradients.compressor import CompressedBucket, Compressor


AnyBucket: TypeAlias = "Bucket | CompressedBucket | EmbeddingBucket"


class Wire(NamedTuple):
    """The form in which gradients are sent. While it stays the same, so do the buckets.

    ``host`` and ``gpu`` are the dtypes to which gradients in each kind of memory are rounded
    before they are sent, or None.
    """

    host: np.dtype[Any] | None
    gpu: np.dtype[Any] | None
    compression: Hashable = None  # the phase of the compressor


#: The largest buffer so far, by dtype and whether it is in GPU memory. Buckets share buffers if
#: only one bucket is in use at a time.
Buffers: TypeAlias = dict[tuple[np.dtype[Any], bool], Array]


class Bucket:
    """Gradients that are exchanged together in one buffer, in host memory or in GPU memory.

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
    members : sequence of int
        Positions of the parameters among all parameters.
    on_gpu : bool
        Whether the gradients are in GPU memory.
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


def make_buckets(
    parameters: Sequence[chainer.Parameter],
    limit: float,
    gpu_limit: float,
    compressed_limit: float,
    wire: Wire,
    n_ranks: int,
    buffers: Buffers | None = None,
    compressor: Compressor | None = None,
    embeddings: Set[VariableNode] = frozenset(),
) -> list[AnyBucket]:
    """Divide the gradients of initialized parameters into buckets, roughly in the given order.

    Parameters
    ----------
    parameters : sequence of chainer.Parameter
        Initialized parameters.
    limit, gpu_limit, compressed_limit : float
        Maximum size in bytes of a bucket in host memory, of one in GPU memory, and of one for the
        compressor. A gradient of at least this size gets its own bucket; with a limit of 0, every
        gradient does.
    wire : Wire
        Form in which gradients are sent.
    n_ranks : int
        Number of ranks.
    buffers : Buffers, optional
        Buffers that all buckets share, if only one bucket is in use at a time. By default, each
        bucket has its own buffer, and even a single gradient is copied into it.
    compressor : Compressor, optional
        Compressor of the gradients; those that it takes get separate buckets.
    embeddings : set of VariableNode
        Parameters for which only rows are sent, unless they are compressed.
    """
    divided: list[tuple[list[int], _Kind]] = []
    filling: dict[_Kind, tuple[list[int], int]] = {}
    for index, parameter in enumerate(parameters):
        array = parameter.array
        is_on_gpu = on_gpu(array)
        has_rows = parameter.node in embeddings
        is_taken = compressor is not None and compressor.takes(parameter, has_rows)
        has_rows &= not is_taken
        dtype = wire.gpu if is_on_gpu and wire.gpu else array.dtype
        kind = _Kind(dtype, is_on_gpu, is_taken, has_rows)
        most = gpu_limit if is_on_gpu else limit
        if is_taken:
            kind, most = kind._replace(dtype=array.dtype), compressed_limit
        if array.nbytes >= most or has_rows:
            divided.append(([index], kind))
            continue
        members, filled = filling.get(kind, ([], 0))
        if not members or filled + array.nbytes > most:
            members, filled = [], 0
            divided.append((members, kind))
        members.append(index)
        filling[kind] = members, filled + array.nbytes
    # A bucket can be exchanged once its last gradient is final.
    divided.sort(key=lambda bucket: bucket[0][-1])

    def make(members: list[int], kind: _Kind) -> AnyBucket:
        of_bucket = [parameters[index] for index in members]
        if kind.is_taken and compressor is not None:
            return compressor.bucket(members, of_bucket, may_be_discarded=buffers is None)
        if kind.has_rows:
            return EmbeddingBucket(members, of_bucket[0], wire.host)
        return Bucket(members, of_bucket, kind.dtype, n_ranks, buffers)

    return [make(members, kind) for members, kind in divided]


class _Kind(NamedTuple):
    """The properties that all gradients of a bucket share."""

    dtype: np.dtype[Any]
    on_gpu: bool
    is_taken: bool
    has_rows: bool


def flat_gradients(parameters: Sequence[chainer.Parameter]) -> list[Array]:
    """Give each parameter its own contiguous, writable gradient array; return flat views.

    The backward of an addition passes the same array to both operands, so that reducing in place
    would reduce it twice. The backward of a broadcast passes a read-only view of fewer elements.
    """
    owners: set[int] = set()
    flat = []
    for parameter in parameters:
        gradient = parameter.grad
        owner = _owner(gradient)
        flags = gradient.flags
        is_usable = flags.c_contiguous and getattr(flags, "writeable", True)  # CuPy has no flag
        if id(owner) in owners or not is_usable:
            parameter.grad = owner = gradient = gradient.copy(order="C")
        owners.add(id(owner))
        flat.append(gradient.reshape(-1))
    return flat


def _owner(array: Any) -> Any:
    while isinstance(base := getattr(array, "base", None), np.ndarray | type(array)):
        array = base
    return array
