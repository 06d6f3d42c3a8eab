"""A stand-in for CuPy's events, and for CUDA errors."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

_NAMES = {
    600: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
}


class CUDARuntimeError(RuntimeError):
    """Like CuPy's, with CUDA's name and description of the error as its message."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_NAMES[status])


class _Array(np.ndarray):
    """An array whose ``data`` is CuPy's."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class StandInCupy:
    """A CuPy whose event queries all return ``status``, just as a CUDA error persists."""

    class ndarray:
        """A class that no array belongs to."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.n_queries = 0
        runtime = SimpleNamespace(eventQuery=self._query, CUDARuntimeError=CUDARuntimeError)
        self.cuda = SimpleNamespace(runtime=runtime, Event=self._event)
        self.cuda.get_elapsed_time = lambda earlier, later: 0.25
        self.cuda.alloc_pinned_memory = bytearray
        self.cuda.get_current_stream = lambda: SimpleNamespace(ptr=0)
        runtime.memcpyHostToDevice = 1
        runtime.memcpyAsync = self._copy
        self._copies: list[tuple[int, int, int]] = []

    def empty(self, n: int, dtype: Any) -> Any:
        return np.zeros(n, dtype).view(_Array)

    def launch(self) -> None:
        """Make the copies, as a CUDA graph that has recorded them does when it is launched."""
        for to, source, n_bytes in self._copies:
            ctypes.memmove(to, source, n_bytes)

    def _copy(self, to: int, source: int, n_bytes: int, kind: int, stream: int) -> None:
        self._copies.append((to, source, n_bytes))

    def _event(self, block: bool = False, disable_timing: bool = False) -> Any:
        return _Event(self, block, disable_timing)

    def _query(self, pointer: int) -> int:
        assert pointer == _Event.ptr
        self.n_queries += 1
        assert self.n_queries < 1000, "polled forever"
        return self.status  # CuPy returns whatever CUDA says


class _Event:
    ptr = 5

    def __init__(self, cupy: StandInCupy, block: bool, disable_timing: bool) -> None:
        self._cupy = cupy
        self.block = block
        self.disable_timing = disable_timing

    def record(self) -> None:
        pass

    @property
    def done(self) -> bool:
        return self._cupy.cuda.runtime.eventQuery(self.ptr) == 0

    def synchronize(self) -> None:
        if self._cupy.status:
            raise CUDARuntimeError(self._cupy.status)
