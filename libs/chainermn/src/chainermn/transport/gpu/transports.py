"""The transports of arrays in GPU memory: NCCL and MPI."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from chainermn.transport.gpu.device import Gpu, the_gpu
from chainermn.transport.gpu.mpi import GpuMpiTransport
from chainermn.transport.gpu.nccl import NcclTransport, check_devices
from chainermn.transport.gpu.staging import Direct, Staging
from chainermn.transport.host.mpi import MpiTransport

if TYPE_CHECKING:
    from mpi4py import MPI


class GpuTransports:
    """Transports of arrays in GPU memory, each made when it is first used.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        Communicator of all ranks.
    is_cuda_aware : bool
        Whether to pass GPU memory to MPI directly; the same on all ranks.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, *, is_cuda_aware: bool) -> None:
        self.mpi_comm = mpi_comm
        self.is_cuda_aware = is_cuda_aware
        self._connected: list[NcclTransport] = []

    @property
    def gpu(self) -> Gpu:
        """The GPU of this rank."""
        return the_gpu()

    @cached_property
    def nccl(self) -> NcclTransport:
        """NCCL among all ranks. Making it is collective."""
        return self.connect(self.mpi_comm)

    @cached_property
    def mpi(self) -> GpuMpiTransport:
        """MPI among all ranks."""
        access = Direct(self.gpu) if self.is_cuda_aware else Staging(self.gpu)
        return GpuMpiTransport(MpiTransport(self.mpi_comm), access)

    def connect(self, mpi_comm: MPI.Intracomm) -> NcclTransport:
        """Connect the ranks of ``mpi_comm`` by NCCL. Collective among all ranks."""
        check_devices(self.mpi_comm, self.gpu)
        transport = NcclTransport(mpi_comm, self.gpu)
        self._connected.append(transport)
        return transport

    def free(self) -> None:
        """Close the transports. Collective."""
        for name in ("nccl", "mpi"):
            self.__dict__.pop(name, None)
        while self._connected:
            self._connected.pop().close()
