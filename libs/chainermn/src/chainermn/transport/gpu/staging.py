"""Give MPI access to arrays in GPU memory, through host memory or directly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from chainermn.transport.gpu.device import Gpu
from chainermn.transport.reducer import Array, Pending

#: Bytes per chunk, not measured yet: large enough to outweigh the overhead of MPI and Python, and
#: small enough for arrays to have several chunks.
CHUNK_BYTES = 1 << 22
# One chunk is copied to the host while MPI uses another and a third is copied back.
_N_SLOTS = 3


class Direct:
    """Passes GPU memory to a CUDA-aware MPI. For one thread at a time.

    Arrays have the same chunks as in `Staging`, so a rank that uses one can communicate with a
    rank that uses the other.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def chunks(
        self, array: Array, *, read: bool = True, written: bool = True
    ) -> Iterator[tuple[Pending, Array]]:
        """Yield chunks of ``array`` in memory that MPI can use, each with an event to wait for.

        If ``read`` is true, the chunk has the contents of ``array``. If ``written`` is true,
        changes to the chunk are copied back to ``array``: asking for the next chunk enqueues that
        copy on the current stream.
        """
        for part in _divide(array):
            yield self.gpu.record(), part

    def finish(self) -> None:
        """Wait until the GPU has made all copies."""


class Staging(Direct):
    """Copies chunks to and from pinned host memory instead, while MPI uses the previous chunk.

    Allocates 12 MiB of pinned memory at its first use and keeps it.
    """

    _last: Pending | None = None

    @cached_property
    def _slots(self) -> list[NDArray[np.uint8]]:
        return [self.gpu.pinned(CHUNK_BYTES) for _ in range(_N_SLOTS)]

    @override
    def chunks(
        self, array: Array, *, read: bool = True, written: bool = True
    ) -> Iterator[tuple[Pending, Array]]:
        if self._last is not None:
            # Another stream may still be copying from these slots.
            self.gpu.wait_for(self._last)
        parts = _divide(array)
        begun = self._begin(parts, read)
        ahead = next(begun, None)
        for part in parts:
            assert ahead is not None
            ready, host = ahead
            ahead = next(begun, None)
            yield ready, host
            if written:
                self.gpu.copy_to_gpu(host, part)
        if parts:
            self._last = self.gpu.record()

    @override
    def finish(self) -> None:
        # After this, the pinned memory can be freed, which CuPy reuses immediately.
        if self._last is not None:
            self._last.Wait()

    def _begin(self, parts: Sequence[Array], read: bool) -> Iterator[tuple[Pending, Array]]:
        for number, part in enumerate(parts):
            host = self._slots[number % _N_SLOTS][: part.nbytes].view(part.dtype)
            if read:
                self.gpu.copy_to_host(part, host)
            # The event also follows any earlier copy from the same slot.
            yield self.gpu.record(), host


def _divide(array: Array) -> list[Array]:
    length = CHUNK_BYTES // array.itemsize
    return [array[start : start + length] for start in range(0, array.size, length)]
