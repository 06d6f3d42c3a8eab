"""Numbers in GPU memory that a recorded step reads, and that are written before each launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from chainer_fast.foreach import Call, Place

_ALIGNMENT = 8


class Numbers:
    """The numbers and tables of a recording, in one piece of memory: a single copy writes them.

    It is the `chainer_fast.foreach.Recording` of an update. The memory is not the graphs' own,
    which later parts of the same step, and other graphs, may use for something else.

    Parameters
    ----------
    xp
        The module CuPy.
    n_bytes
        Size of the memory.
    skip
        Array of bool without axes in GPU memory: kernels of the update do nothing if it is true.
    """

    def __init__(self, xp: ModuleType, n_bytes: int, skip: Any) -> None:
        self._xp, self.skip = xp, skip
        self._on_gpu = xp.zeros(n_bytes, np.uint8)
        self._host = np.zeros(n_bytes, np.uint8)
        self._written: bytes | None = None
        self.begin()

    def begin(self) -> None:
        """Forget all numbers, because the step is enqueued once more."""
        self._n_bytes = 0
        self._places: list[tuple[Sequence[Place], Any]] = []

    def upload(self, array: Any) -> Any:
        """Return a table in GPU memory, which is filled by `write`."""
        host, on_gpu = self._array(array.size, array.dtype)
        host[:] = array.ravel()
        return on_gpu.reshape(array.shape)

    def numbers(self, places: Sequence[Place], values: Sequence[Any], dtype: Any) -> Any:
        """Return an array in GPU memory for numbers that are written before each launch."""
        host, on_gpu = self._array(len(values), dtype)
        host[:] = values
        self._places.append((places, host))
        return on_gpu

    def set(self, of_owners: Sequence[Mapping[Call, Any]] | None) -> None:
        """Set numbers, given for each owner by calls; None if they are those of the last step."""
        if of_owners is None:
            return
        are_alike = all(each is of_owners[0] for each in of_owners)
        for places, host in self._places:
            call = places[0].call
            if call not in of_owners[0]:
                continue  # it never changes
            if are_alike:
                host.fill(of_owners[0][call])
            else:
                host[:] = [of_owners[place.owner][place.call] for place in places]

    def write(self) -> None:
        """Write the numbers to GPU memory, if any has changed."""
        n_bytes = self._n_bytes
        current = self._host[:n_bytes].tobytes()
        if n_bytes and current != self._written:
            self._on_gpu[:n_bytes] = self._xp.asarray(self._host[:n_bytes].copy())
            self._written = current

    def _array(self, n: int, dtype: Any) -> tuple[Any, Any]:
        begin = self._n_bytes
        end = begin + n * np.dtype(dtype).itemsize
        if end > len(self._host):
            raise ValueError(f"the numbers of a step take more than {len(self._host)} bytes")
        self._n_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._host[begin:end].view(dtype), self._on_gpu[begin:end].view(dtype)
