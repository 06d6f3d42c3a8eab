"""Collectives on arrays in GPU memory, over MPI."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
from typing_extensions import override

from chainermn.transport.gpu.staging import Direct, MpiAccess, Staging
from chainermn.transport.host.mpi import MpiTransport, Op, load_mpi
from chainermn.transport.reducer import AllReducer, Array, Steps


class GpuMpiTransport:
    """The collectives of `MpiTransport`, on arrays in GPU memory.

    The host waits until an array has been sent. A received array is complete once the current
    stream has finished its work.

    Parameters
    ----------
    transport : MpiTransport
        Transport that sends and receives the chunks of arrays.
    access : MpiAccess
    """

    def __init__(self, transport: MpiTransport, access: MpiAccess) -> None:
        self._mpi = transport
        self._access = access
        self._incoming = type(access)(access.gpu)
        self._staging = access if isinstance(access, Staging) else Staging(access.gpu)

    def allreduce(self, array: Array, op: Op = "sum") -> None:
        """Reduce the arrays of all ranks elementwise; every rank gets the result.

        Parameters
        ----------
        array : array of shape (n,), integers, bool or floats
            Array to reduce; float16 is reduced in float32.
        op : {'sum', 'mean', 'max', 'min', 'prod'}
        """
        access = self._staging if array.itemsize == 2 else self._access
        for chunk in _ready(access, array, read=True, written=True):
            self._mpi.allreduce(chunk, op)

    def bcast(self, array: Array, root: int = 0) -> None:
        """Give every rank the array of ``root``."""
        is_root = self._mpi.rank == root
        for chunk in _ready(self._access, array, read=is_root, written=not is_root):
            self._mpi.bcast(chunk, root)

    def send(self, array: Array, dest: int, *tag: int) -> None:
        """Send ``array`` to ``dest``, which calls :meth:`recv`."""
        for chunk in _ready(self._access, array, read=True, written=False):
            self._mpi.send(chunk, dest, *tag)

    def recv(self, array: Array, source: int, *tag: int) -> None:
        """Receive ``array`` from ``source``, which calls :meth:`send`."""
        for chunk in _ready(self._access, array, read=False, written=True):
            self._mpi.recv(chunk, source, *tag)

    def sendrecv(self, array: Array, dest: int, into: Array, source: int) -> None:
        """Send ``array`` to ``dest`` while receiving ``into`` from ``source``."""
        outgoing = _ready(self._access, array, read=True, written=False)
        incoming = _ready(self._incoming, into, read=False, written=True)
        nothing = np.empty(0, np.uint8)
        for given, taken in zip_longest(outgoing, incoming, fillvalue=nothing):
            self._mpi.sendrecv(given, dest, taken, source)


def _ready(access: MpiAccess, array: Array, *, read: bool, written: bool) -> Iterator[Array]:
    for ready, chunk in access.chunks(array, read=read, written=written):
        ready.Wait()
        yield chunk


class GpuMpiReducer(AllReducer):
    """All-reduces of arrays in GPU memory through host memory.

    Parameters
    ----------
    host : AllReducer
        Reducer of the chunks in host memory. It also determines how sums are rounded.
    staging : Staging
    """

    def __init__(self, host: AllReducer, staging: Staging) -> None:
        super().__init__(host.rank, host.size)
        self._host = host
        self._staging = staging

    @override
    def allreduce(
        self, array: Array, divisor: int = 1, wire_dtype: np.dtype[Any] | None = None
    ) -> Steps:
        for ready, chunk in self._staging.chunks(array, read=True, written=True):
            yield ready
            yield from self._host.allreduce(chunk, divisor, wire_dtype)


class CudaAwareReducer(AllReducer):
    """All-reduces of arrays in GPU memory by a CUDA-aware MPI.

    MPI sums only 32-bit and 64-bit numbers; 16-bit numbers go through host memory.

    Parameters
    ----------
    host : GpuMpiReducer
        Reducer of 16-bit arrays, and of those that are rounded before they are sent.
    mpi_comm : mpi4py.MPI.Intracomm
        Communicator of the same ranks.
    direct : Direct
    """

    def __init__(self, host: GpuMpiReducer, mpi_comm: Any, direct: Direct) -> None:
        super().__init__(host.rank, host.size)
        self._host = host
        self._mpi_comm = mpi_comm
        self._direct = direct
        self._in_place = load_mpi().IN_PLACE

    @override
    def allreduce(
        self, array: Array, divisor: int = 1, wire_dtype: np.dtype[Any] | None = None
    ) -> Steps:
        if (wire_dtype or array.dtype) != array.dtype or array.itemsize == 2:
            yield from self._host.allreduce(array, divisor, wire_dtype)
            return
        for ready, chunk in self._direct.chunks(array, read=True, written=True):
            yield ready
            yield self._mpi_comm.Iallreduce(self._in_place, chunk)
        if divisor > 1:
            array /= divisor
