"""What carries gradients in GPU memory: inside a host, between hosts, between all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, cast

from chainermn.transport.gpu.cuda_awareness import why_not_cuda_aware
from chainermn.transport.gpu.device import Gpu
from chainermn.transport.gpu.mpi import (
    CudaAwareReducer,
    GpuMpiReducer,
    GpuMpiTransport,
)
from chainermn.transport.gpu.nccl import NcclTransport, check_devices
from chainermn.transport.gpu.nccl_reducer import NcclReducer
from chainermn.transport.gpu.staging import Direct, Passage, Staging
from chainermn.transport.host.mpi import MpiTransport
from chainermn.transport.host.reducers import Reducers
from chainermn.transport.reducer import AllReducer, Array, Reducer
from chainermn.transport.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI


class GpuReducers:
    """The reducers among different parts of the ranks, each made when it is first asked for.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        All ranks. Every one of them must ask for the same in the same order.
    topology : Topology
    gpu : Gpu
        Each rank must have chosen its device before anything is asked for.
    host : Reducers
        What adds up in host memory.
    everyone_by_nccl : bool
        Or else by MPI.
    may_be_direct : bool
        Whether MPI may be given GPU memory, if it can read it.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        topology: Topology,
        gpu: Gpu,
        host: Reducers,
        *,
        everyone_by_nccl: bool,
        may_be_direct: bool,
    ) -> None:
        self._mpi_comm = mpi_comm
        self._topology = topology
        self._gpu = gpu
        self._host = host
        self._everyone_by_nccl = everyone_by_nccl
        self._may_be_direct = may_be_direct
        self._owned: list[MPI.Intracomm] = []
        self._connected: list[NcclTransport] = []

    @cached_property
    def everyone(self) -> AllReducer:
        """Among all ranks."""
        if self._everyone_by_nccl:
            return NcclReducer(self.nccl)
        return self._by_mpi(self._host.everyone, self._mpi_comm)

    @cached_property
    def intra(self) -> Reducer:
        """Among the ranks of this host, by NCCL."""
        self._check_devices()
        return NcclReducer(self._connect(self._split(self._topology.inter_rank)))

    @cached_property
    def inter(self) -> AllReducer:
        """Among the ranks that have the same place on their hosts, by MPI."""
        host = self._host.inter
        return self._by_mpi(host, self._split(self._topology.intra_rank))

    @cached_property
    def nccl(self) -> NcclTransport:
        """NCCL among all ranks."""
        self._check_devices()
        return self._connect(self._mpi_comm)

    @cached_property
    def mpi(self) -> GpuMpiTransport:
        """MPI among all ranks."""
        passage = Direct(self._gpu) if self._is_direct else Staging(self._gpu)
        return self._transport(passage)

    @cached_property
    def point_to_point(self) -> GpuMpiTransport:
        """MPI for messages between two ranks, which cannot find out whether it takes GPU memory.

        Making it is not collective.
        """
        return self._transport(Staging(self._gpu))

    def pieces(self, buffer: Array) -> Iterator[Array]:
        """Return the buffer in one piece: nothing here takes memory in proportion."""
        yield buffer

    def free(self) -> None:
        """Release what the reducers hold. Collective."""
        for name in ("everyone", "intra", "inter", "nccl", "mpi", "point_to_point"):
            self.__dict__.pop(name, None)
        while self._connected:
            self._connected.pop().close()
        while self._owned:
            self._owned.pop().Free()

    @cached_property
    def _is_direct(self) -> bool:
        if not self._may_be_direct:
            return False
        reason = why_not_cuda_aware(self._mpi_comm, self._topology.inter_rank)
        if reason and self._mpi_comm.rank == 0:
            _warn_of_staging(reason)
        return not reason

    def _check_devices(self) -> None:
        check_devices(self._mpi_comm, self._gpu)

    def _connect(self, mpi_comm: MPI.Intracomm) -> NcclTransport:
        transport = NcclTransport(mpi_comm, self._gpu)
        self._connected.append(transport)
        return transport

    def _split(self, color: int) -> MPI.Intracomm:
        part = cast("MPI.Intracomm", self._mpi_comm.Split(color, self._mpi_comm.rank))
        self._owned.append(part)
        return part

    def _by_mpi(self, host: AllReducer, mpi_comm: MPI.Intracomm) -> AllReducer:
        staged = GpuMpiReducer(host, Staging(self._gpu))
        if self._is_direct:
            return CudaAwareReducer(staged, mpi_comm, Direct(self._gpu))
        return staged

    def _transport(self, passage: Passage) -> GpuMpiTransport:
        return GpuMpiTransport(MpiTransport(self._mpi_comm), passage)


_warned: list[bool] = []


def _warn_of_staging(reason: str) -> None:
    if not _warned:
        _warned.append(True)
        warnings.warn(
            f"MPI cannot read GPU memory ({reason}): what travels by MPI is copied through host "
            "memory. The communicator 'pure_nccl' does without; 'non_cuda_aware' does the same "
            "without this warning",
            RuntimeWarning,
            stacklevel=2,
        )
