"""Move arrays in GPU memory by NCCL and by MPI."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.gpu.nccl import NcclTransport, check_devices
from chainermn.transport.gpu.staging import Direct, Staging
from chainermn.transport.host.mpi import MpiTransport, Op
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from mpi4py import MPI


class GpuTransports:
    """Transports of arrays in GPU memory among all ranks, each created on first use.

    If ``is_cuda_aware``, which must be equal on all ranks, MPI gets GPU memory directly, except
    for sums.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, *, is_cuda_aware: bool) -> None:
        self.mpi_comm = mpi_comm
        self.is_cuda_aware = is_cuda_aware
        self._connected: list[NcclTransport] = []

    @cached_property
    def nccl(self) -> NcclTransport:
        """NCCL among all ranks. Creating it is collective."""
        return self.connect(self.mpi_comm)

    @cached_property
    def mpi(self) -> GpuMpiTransport:
        """MPI among all ranks."""
        access = Direct(the_gpu()) if self.is_cuda_aware else Staging(the_gpu())
        return GpuMpiTransport(MpiTransport(self.mpi_comm), access)

    def connect(self, mpi_comm: MPI.Intracomm) -> NcclTransport:
        """Connect the ranks of ``mpi_comm`` with NCCL. Collective among all ranks."""
        check_devices(self.mpi_comm, the_gpu())
        transport = NcclTransport(mpi_comm, the_gpu())
        self._connected.append(transport)
        return transport

    def free(self) -> None:
        """Close the transports. Collective."""
        self.__dict__.pop("nccl", None)
        mpi = self.__dict__.pop("mpi", None)
        if mpi is not None:
            mpi.finish()
        while self._connected:
            self._connected.pop().close()


class GpuMpiTransport:
    """The collectives of `MpiTransport`, on arrays in GPU memory.

    MPI accesses arrays that it only moves through ``access``. Sums always go through host memory;
    see `GpuMpiReducer`. The host waits until an array has been sent. A received array is complete
    once the current stream has finished its work.
    """

    def __init__(self, transport: MpiTransport, access: Direct) -> None:
        self._mpi = transport
        self._access = access
        self._incoming = type(access)(access.gpu)
        self._staging = access if isinstance(access, Staging) else Staging(access.gpu)

    def allreduce(self, array: Array, op: Op = "sum") -> None:
        """See `MpiTransport.allreduce`."""
        for chunk in _ready(self._staging, array):
            self._mpi.allreduce(chunk, op)

    def bcast(self, array: Array, root: int = 0) -> None:
        """Give every rank the array of ``root``."""
        is_root = self._mpi.rank == root
        for chunk in _ready(self._access, array, read=is_root, written=not is_root):
            self._mpi.bcast(chunk, root)

    def send(self, array: Array, dest: int, *tag: int) -> None:
        """Send ``array`` to ``dest``, which calls :meth:`recv`."""
        for chunk in _ready(self._access, array, written=False):
            self._mpi.send(chunk, dest, *tag)

    def recv(self, array: Array, source: int, *tag: int) -> None:
        """Receive ``array`` from ``source``, which calls :meth:`send`."""
        for chunk in _ready(self._access, array, read=False):
            self._mpi.recv(chunk, source, *tag)

    def sendrecv(self, array: Array, dest: int, into: Array, source: int) -> None:
        """Send ``array`` to ``dest`` while receiving ``into`` from ``source``."""
        outgoing = _ready(self._access, array, written=False)
        incoming = _ready(self._incoming, into, read=False)
        nothing = np.empty(0, np.uint8)
        for given, taken in zip_longest(outgoing, incoming, fillvalue=nothing):
            self._mpi.sendrecv(given, dest, taken, source)

    def finish(self) -> None:
        """Wait until the GPU has finished all work of this transport."""
        for access in (self._staging, self._access, self._incoming):
            access.finish()


def _ready(
    access: Direct, array: Array, *, read: bool = True, written: bool = True
) -> Iterator[Array]:
    for ready, chunk in access.chunks(array, read=read, written=written):
        ready.Wait()
        yield chunk
