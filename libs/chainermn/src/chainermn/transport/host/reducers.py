"""What carries gradients: inside a host, between hosts, between all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, cast

from chainermn.transport.host.mpi_reducer import MpiReducer
from chainermn.transport.host.shared_memory import (
    SharedMemoryReducer,
    bytes_needed,
    share_memory,
)
from chainermn.transport.reducer import Array, HostReducer, SingleReducer
from chainermn.transport.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

_PIECE_BYTES = 1 << 22


class Reducers:
    """The reducers among different parts of the ranks, each made when it is first asked for.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        All ranks. Every one of them must ask for the same reducers in the same order.
    topology : Topology
    """

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        self._mpi_comm = mpi_comm
        self._topology = topology
        self._owned: list[MPI.Intracomm] = []
        self._made: list[HostReducer] = []

    @cached_property
    def everyone(self) -> HostReducer:
        """Among all ranks: by shared memory if they are on one host."""
        if self._topology.inter_size == 1:
            return self._on_one_host(self._mpi_comm)
        return self._by_mpi(self._mpi_comm)

    @cached_property
    def intra(self) -> HostReducer:
        """Among the ranks of this host."""
        return self._on_one_host(self._split(self._topology.inter_rank))

    @cached_property
    def inter(self) -> HostReducer:
        """Among the ranks that have the same place on their hosts."""
        return self._by_mpi(self._split(self._topology.intra_rank))

    def pieces(self, buffer: Array) -> Iterator[Array]:
        """Divide a buffer where an algorithm needs memory in proportion."""
        length = _PIECE_BYTES // buffer.itemsize
        for start in range(0, buffer.size, length):
            yield buffer[start : start + length]

    def take_overflow(self) -> float:
        """Return the largest number that has become infinite since this was last asked, or 0."""
        largest = max((reducer.adder.casts.overflow for reducer in self._made), default=0.0)
        for reducer in self._made:
            reducer.adder.casts.overflow = 0.0
        return largest

    def free(self) -> None:
        """Release what the reducers hold. Collective."""
        self._made.clear()
        for name in ("everyone", "intra", "inter"):
            self.__dict__.pop(name, None)
        while self._owned:
            self._owned.pop().Free()

    def _split(self, color: int) -> MPI.Intracomm:
        part = cast("MPI.Intracomm", self._mpi_comm.Split(color, self._mpi_comm.rank))
        self._owned.append(part)
        return part

    def _by_mpi(self, mpi_comm: MPI.Intracomm) -> HostReducer:
        return self._note(SingleReducer() if mpi_comm.size == 1 else MpiReducer(mpi_comm))

    def _on_one_host(self, mpi_comm: MPI.Intracomm) -> HostReducer:
        memory = None if mpi_comm.size == 1 else share_memory(mpi_comm)
        reasons = self._mpi_comm.allgather(memory if isinstance(memory, str) else "")
        lacking = [(rank, reason) for rank, reason in enumerate(reasons) if reason]
        if lacking:
            if self._mpi_comm.rank == 0:
                _warn_of_fallback(*lacking[0], bytes_needed(self._topology.intra_size))
            return self._by_mpi(mpi_comm)
        if memory is None or isinstance(memory, str):
            return self._note(SingleReducer())
        return self._note(SharedMemoryReducer(mpi_comm, memory))

    def _note(self, reducer: HostReducer) -> HostReducer:
        self._made.append(reducer)
        return reducer


def _warn_of_fallback(rank: int, reason: str, n_bytes: int) -> None:
    warnings.warn(
        f"rank {rank} cannot share memory with the other ranks of its host: {reason}. "
        "Gradients travel by MPI instead, which is slower. "
        f"In /dev/shm {n_bytes / 2**20:.1f} MiB are needed for each communicator; "
        "docker run has --shm-size for it, and --ipc for ranks in different containers",
        RuntimeWarning,
        stacklevel=2,
    )
