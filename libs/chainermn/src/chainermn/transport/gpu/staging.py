"""How MPI gets at arrays in GPU memory: through host memory, or directly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from chainermn.transport.gpu.device import Gpu
from chainermn.transport.reducer import Array, Pending

# Measured nowhere yet: long against what MPI and Python cost, short against the whole.
_CHUNK_BYTES = 1 << 22
# While one is being copied to the host, MPI has another, and a third is being copied back.
_N_SLOTS = 3


class MpiAccess(ABC):
    """A way for arrays in GPU memory to MPI.

    Both divide arrays into the same chunks, so that a rank that uses one can talk to a rank that
    uses the other. For one thread at a time.

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
        """Yield chunk after chunk in a form that MPI can use, and what to wait for before that.

        Parameters
        ----------
        array : array of shape (n,), C-contiguous, in GPU memory
        read : bool
            Chunks have the contents of ``array``.
        written : bool
            ``array`` gets what the caller leaves in the chunks, each by the time the stream has
            done what it is given when the next one is asked for.
        """


def _divide(array: Array) -> list[Array]:
    length = _CHUNK_BYTES // array.itemsize
    return [array[start : start + length] for start in range(0, array.size, length)]


class Staging(MpiAccess):
    """Copies to and from pinned host memory, while MPI is busy with the chunk before.

    Takes 12 MiB of pinned memory at its first use and keeps it.
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
            # Of another stream, perhaps, which still copies from here.
            gpu.wait_for(self._last)

        def begin(number: int) -> tuple[Pending, Array]:
            part = parts[number]
            host = self._slots[number % _N_SLOTS][: part.nbytes].view(part.dtype)
            if read:
                gpu.copy_to_host(part, host)
            # By then an earlier copy from the same slot is over too.
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
    """For an MPI that reads and writes GPU memory itself."""

    @override
    def chunks(
        self, array: Array, *, read: bool, written: bool
    ) -> Iterator[tuple[Pending, Array]]:
        for part in _divide(array):
            yield self.gpu.record(), part
