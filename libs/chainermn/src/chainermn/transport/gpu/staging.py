"""How MPI accesses arrays in GPU memory: through host memory, or directly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from chainermn.transport.gpu.device import Gpu
from chainermn.transport.reducer import Array, Pending

# Not measured yet: large enough to outweigh the overhead of MPI and Python, small enough that
# arrays have several chunks.
_CHUNK_BYTES = 1 << 22
# While one chunk is copied to the host, MPI uses another, and a third is copied back.
_N_SLOTS = 3


class MpiAccess(ABC):
    """A way to pass arrays in GPU memory to MPI.

    All ways divide arrays into the same chunks, so ranks that use different ones can communicate.
    For one thread at a time.

    Parameters
    ----------
    gpu : Gpu
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    @abstractmethod
    def chunks(
        self, array: Array, *, read: bool, written: bool
    ) -> Iterator[tuple[Pending, Array]]:
        """Yield each chunk in memory that MPI can use, and the event to wait for before using it.

        Parameters
        ----------
        array : array of shape (n,), C-contiguous, in GPU memory
        read : bool
            Whether the chunks get the contents of ``array``.
        written : bool
            Whether ``array`` gets what the caller writes to the chunks. Asking for the next chunk
            enqueues the copy of the last one on the current stream.
        """


def _divide(array: Array) -> list[Array]:
    length = _CHUNK_BYTES // array.itemsize
    return [array[start : start + length] for start in range(0, array.size, length)]


class Staging(MpiAccess):
    """Copies chunks to and from pinned host memory, while MPI is busy with the previous chunk.

    Allocates 12 MiB of pinned memory at its first use and keeps it.
    """

    _last: Pending | None = None

    @cached_property
    def _slots(self) -> list[NDArray[np.uint8]]:
        return [self.gpu.pinned(_CHUNK_BYTES) for _ in range(_N_SLOTS)]

    @override
    def chunks(
        self, array: Array, *, read: bool, written: bool
    ) -> Iterator[tuple[Pending, Array]]:
        gpu, parts = self.gpu, _divide(array)
        if self._last is not None:
            # Another stream may still be copying from these slots.
            gpu.wait_for(self._last)

        def begin(number: int) -> tuple[Pending, Array]:
            part = parts[number]
            host = self._slots[number % _N_SLOTS][: part.nbytes].view(part.dtype)
            if read:
                gpu.copy_to_host(part, host)
            # The event also follows any earlier copy from the same slot.
            return gpu.record(), host

        ahead = begin(0) if parts else None
        for number, part in enumerate(parts):
            assert ahead is not None
            ready, host = ahead
            ahead = begin(number + 1) if number + 1 < len(parts) else None
            yield ready, host
            if written:
                gpu.copy_to_gpu(host, part)
        if parts:
            self._last = gpu.record()


class Direct(MpiAccess):
    """Passes GPU memory to a CUDA-aware MPI."""

    @override
    def chunks(
        self, array: Array, *, read: bool, written: bool
    ) -> Iterator[tuple[Pending, Array]]:
        for part in _divide(array):
            yield self.gpu.record(), part
