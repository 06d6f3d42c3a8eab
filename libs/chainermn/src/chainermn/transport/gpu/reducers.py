"""Reducers of arrays in GPU memory: NCCL inside a host, MPI between hosts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from chainermn.transport.gpu.mpi import CudaAwareReducer, GpuMpiReducer
from chainermn.transport.gpu.nccl_reducer import NcclReducer
from chainermn.transport.gpu.staging import Direct, Staging
from chainermn.transport.reducer import AllReducer, Array, Reducer
from chainermn.transport.reducers import Reducers

if TYPE_CHECKING:
    from mpi4py import MPI

    from chainermn.transport.gpu.transports import GpuTransports
    from chainermn.transport.host.reducers import HostReducers
    from chainermn.transport.topology import Topology


class GpuReducers(Reducers):
    """Reducers in GPU memory. Each rank must choose its device before it uses one of them.

    Parameters
    ----------
    transports : GpuTransports
        Transports among all ranks.
    topology : Topology
        Host of each rank.
    host : HostReducers
        Reducers of the same ranks in host memory.
    everyone_by_nccl : bool
        Whether the reducer among all ranks uses NCCL; otherwise it uses MPI.
    """

    def __init__(
        self,
        transports: GpuTransports,
        topology: Topology,
        host: HostReducers,
        *,
        everyone_by_nccl: bool,
    ) -> None:
        super().__init__(transports.mpi_comm, topology)
        self._transports = transports
        self._host = host
        self._everyone_by_nccl = everyone_by_nccl

    @cached_property
    def everyone(self) -> AllReducer:
        """The reducer among all ranks."""
        if self._everyone_by_nccl:
            return NcclReducer(self._transports.nccl)
        return self._by_mpi(self._host.everyone, self.mpi_comm)

    @cached_property
    def intra(self) -> Reducer:
        """The reducer among the ranks of this host, by NCCL."""
        return NcclReducer(self._transports.connect(self._split(self.topology.inter_rank)))

    @cached_property
    def inter(self) -> AllReducer:
        """The reducer among the ranks that have the same position on their hosts, by MPI."""
        return self._by_mpi(self._host.inter, self._split(self.topology.intra_rank))

    def pieces(self, buffer: Array) -> Iterator[Array]:
        """Return the buffer in one piece: these reducers need no scratch memory of its size."""
        yield buffer

    def _by_mpi(self, host: AllReducer, mpi_comm: MPI.Intracomm) -> AllReducer:
        gpu = self._transports.gpu
        staged = GpuMpiReducer(host, Staging(gpu))
        if self._transports.is_cuda_aware:
            return CudaAwareReducer(staged, mpi_comm, Direct(gpu))
        return staged
