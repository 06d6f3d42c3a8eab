"""Buckets: gradients that are exchanged together in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from chainermn.gradients.copies import Copies, GpuCopies, HostCopies
from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    import chainer

T = TypeVar("T")


class PerMemory(NamedTuple, Generic[T]):
    """A pair of values: one for gradients in host memory, one for those in GPU memory."""

    host: T
    gpu: T

    def choose(self, on_gpu: bool) -> T:
        """Return the value for gradients in GPU memory, or else for those in host memory."""
        return self.gpu if on_gpu else self.host


#: Dtypes to which gradients are rounded before they are sent; None if they are not.
WireDtypes: TypeAlias = PerMemory[np.dtype[Any] | None]


class BufferMemory:
    """Memory that buffers share, if only one of them is in use at a time."""

    def __init__(self) -> None:
        self._buffers: dict[np.dtype[Any], Array] = {}

    def buffer_for(self, copies: Copies) -> Array:
        """Return a buffer, which is valid until the next call."""
        buffer = self._buffers.get(copies.dtype)
        if buffer is None or buffer.size < copies.length:
            buffer = self._buffers[copies.dtype] = copies.new_buffer()
        return buffer[: copies.length]


class Bucket:
    """Gradients that are exchanged together in one buffer, in host memory or in GPU memory.

    Parameters
    ----------
    members : sequence of int
        Positions of the gradients' parameters among all parameters.
    copies : Copies
    memory : BufferMemory
    in_place : bool
        Whether a single gradient in host memory serves as its own buffer, without a copy.

    Attributes
    ----------
    members : sequence of int
    on_gpu : bool
        Whether the gradients are in GPU memory.
    buffer : array of shape (n,)
        Elements of the gradients, in the order of ``members``; set by `gather`.
    """

    buffer: Array

    def __init__(
        self, members: Sequence[int], copies: Copies, memory: BufferMemory, *, in_place: bool
    ) -> None:
        self.members = members
        self.on_gpu = isinstance(copies, GpuCopies)
        self._copies = copies
        self._memory = memory
        self._is_alone = in_place and len(members) == 1 and not self.on_gpu

    def gather(self, gradients: Sequence[Array]) -> None:
        """Copy one-dimensional contiguous gradients into the buffer."""
        if self._is_alone:
            (self.buffer,) = gradients
            return
        self.buffer = self._memory.buffer_for(self._copies)
        self._copies.gather(gradients, self.buffer)

    def scatter(self, gradients: Sequence[Array]) -> None:
        """Copy the means from the buffer into one-dimensional contiguous gradients."""
        if not self._is_alone:
            self._copies.scatter(self.buffer, gradients)


def make_buckets(
    parameters: Sequence[chainer.Parameter],
    limits: PerMemory[float],
    gpu_wire_dtype: np.dtype[Any] | None,
    n_ranks: int,
    memories: PerMemory[BufferMemory] | None = None,
) -> list[Bucket]:
    """Divide the gradients of parameters into buckets, roughly in the given order.

    Parameters
    ----------
    parameters : sequence of chainer.Parameter
        Initialised parameters.
    limits : PerMemory of float
        Maximum size of a bucket in bytes. A gradient of at least this size gets a bucket to
        itself; if the limit is 0, every gradient does.
    gpu_wire_dtype : dtype or None
        Dtype of buffers in GPU memory; None for the dtype of the gradients.
    n_ranks : int
    memories : PerMemory of BufferMemory, optional
        Memory that all buckets share, if only one bucket is in use at a time. By default each
        bucket has its own memory, and even a single gradient is copied into it.
    """
    divided: list[tuple[list[int], np.dtype[Any], bool]] = []
    filling: dict[tuple[np.dtype[Any], bool], tuple[list[int], int]] = {}
    for index, parameter in enumerate(parameters):
        array = parameter.array
        is_on_gpu = on_gpu(array)
        dtype = gpu_wire_dtype if is_on_gpu and gpu_wire_dtype else array.dtype
        limit = limits.choose(is_on_gpu)
        if array.nbytes >= limit:
            divided.append(([index], dtype, is_on_gpu))
            continue
        members, filled = filling.get((dtype, is_on_gpu), ([], 0))
        if not members or filled + array.nbytes > limit:
            members, filled = [], 0
            divided.append((members, dtype, is_on_gpu))
        members.append(index)
        filling[dtype, is_on_gpu] = members, filled + array.nbytes
    # A bucket can be exchanged once its last gradient is final.
    divided.sort(key=lambda bucket: bucket[0][-1])
    return [
        Bucket(
            members,
            _copies([parameters[index] for index in members], dtype, is_on_gpu, n_ranks),
            BufferMemory() if memories is None else memories.choose(is_on_gpu),
            in_place=memories is not None,
        )
        for members, dtype, is_on_gpu in divided
    ]


def _copies(
    parameters: Sequence[chainer.Parameter],
    dtype: np.dtype[Any],
    is_on_gpu: bool,
    n_ranks: int,
) -> Copies:
    sizes = [parameter.size for parameter in parameters]
    if not is_on_gpu:
        return HostCopies(sizes, dtype)
    dtypes = [parameter.dtype for parameter in parameters]
    return GpuCopies(the_gpu(), sizes, dtypes, dtype, n_ranks)


def flat_gradients(parameters: Sequence[chainer.Parameter]) -> list[Array]:
    """Give each parameter a contiguous, writable gradient array of its own; return flat views.

    The backward of an addition passes one array to both operands, which would be reduced twice in
    place. The backward of a broadcast passes a read-only view of fewer elements.
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
