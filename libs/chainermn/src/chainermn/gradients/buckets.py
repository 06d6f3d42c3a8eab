"""Divide gradients into buckets, which are exchanged together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from chainermn.gradients.bucket import Bucket, Buffers, DenseBucket
from chainermn.gradients.embeddings import EmbeddingBucket
from chainermn.transport.gpu.device import on_gpu

if TYPE_CHECKING:
    import chainer
    from chainer.variable import VariableNode

    from chainermn.gradients.compressor import Compressor


class Wire(NamedTuple):
    """The form in which gradients are sent. While it stays the same, so do the buckets.

    ``host`` and ``gpu`` are the dtypes to which gradients in each kind of memory are rounded
    before they are sent, or None.
    """

    host: np.dtype[Any] | None
    gpu: np.dtype[Any] | None
    compression: Hashable = None  # the phase of the compressor


class Limits(NamedTuple):
    """The maximum sizes of buckets in bytes, in each kind of memory and for a compressor.

    A gradient of at least this size gets its own bucket; with a limit of 0, every gradient does.
    """

    host: float
    gpu: float
    compressed: float


def make_buckets(
    parameters: Sequence[chainer.Parameter],
    limits: Limits,
    wire: Wire,
    n_ranks: int,
    *,
    buffers: Buffers | None = None,
    compressor: Compressor | None = None,
    embeddings: Set[VariableNode] = frozenset(),
) -> list[Bucket]:
    """Divide the gradients of initialized parameters into buckets, roughly in the given order.

    Parameters
    ----------
    parameters : sequence of chainer.Parameter
        Initialized parameters.
    limits : Limits
        Maximum sizes of buckets.
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
        most = limits.gpu if is_on_gpu else limits.host
        if is_taken:
            kind, most = kind._replace(dtype=array.dtype), limits.compressed
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

    def make(members: list[int], kind: _Kind) -> Bucket:
        of_bucket = [parameters[index] for index in members]
        if kind.is_taken and compressor is not None:
            return compressor.bucket(members, of_bucket, may_be_discarded=buffers is None)
        if kind.has_rows:
            return EmbeddingBucket(members, of_bucket[0], wire.host)
        return DenseBucket(members, of_bucket, kind.dtype, n_ranks, buffers)

    return [make(members, kind) for members, kind in divided]


class _Kind(NamedTuple):
    """The properties that all gradients of a bucket share."""

    dtype: np.dtype[Any]
    on_gpu: bool
    is_taken: bool
    has_rows: bool
