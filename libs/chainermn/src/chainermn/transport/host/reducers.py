"""Reduce arrays in host memory: through shared memory inside a host, by MPI between hosts."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from chainermn.process.cores import cores_of_job
from chainermn.transport.host import in_turn, shared_memory
from chainermn.transport.host.arithmetic import Adder, divide
from chainermn.transport.host.futex import Futex
from chainermn.transport.host.in_turn import InTurnReducer
from chainermn.transport.host.memory import share_memory
from chainermn.transport.host.mpi import load_mpi
from chainermn.transport.host.mpi_reducer import MpiReducer
from chainermn.transport.host.shared_memory import SharedMemoryReducer
from chainermn.transport.reducer import Array, Dtype, Pending, Reducer, Reducers, Steps

if TYPE_CHECKING:
    from mpi4py import MPI

    from chainermn.transport.topology import Topology

_PIECE_BYTES = 1 << 22

# With more ranks per core, barriers take longer than the work between them.
_RANKS_PER_CORE = 4


class HostReducers(Reducers):
    """Reducers in host memory. All three have every collective, not only all-reduce.

    Each rank sums one shard of the elements, in rank order; 16-bit elements are summed in float32.
    So all ranks get the same bits, regardless of how the elements are divided into arrays. The
    algorithm is the reduce-scatter and all-gather of Thakur, Rabenseifner and Gropp, "Optimization
    of collective communication operations in MPICH", Int. J. High Performance Computing
    Applications 19(1), 2005. The difference is that shards are sent directly to the rank that sums
    them, so that each sum is rounded to the wire dtype only once.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, topology: Topology) -> None:
        super().__init__(mpi_comm, topology)
        self._adder = Adder()

    @cached_property
    def everyone(self) -> Reducer:
        """The reducer among all ranks: through shared memory if they are on one host."""
        if self.topology.inter_size == 1:
            return self._by_shared_memory(self.mpi_comm)
        return self._by_mpi(self.mpi_comm)

    @cached_property
    def intra(self) -> Reducer:
        """The reducer among the ranks of this host."""
        return self._by_shared_memory(self._split(self.topology.inter_rank))

    @cached_property
    def inter(self) -> Reducer:
        """The reducer among the ranks that have the same position on their hosts."""
        return self._by_mpi(self._split(self.topology.intra_rank))

    @cached_property
    def messages(self) -> MpiReducer:
        """Transport for payloads that cannot be summed. Creating it is not collective."""
        return MpiReducer(self.mpi_comm, self._adder)

    def maximum(self, array: Array) -> None:
        """Replace a few 64-bit integers with their maxima over all ranks. Collective."""
        everyone = self.__dict__.get("everyone")  # creating it would be collective
        if isinstance(everyone, InTurnReducer) and array.size <= in_turn.MOST_INTEGERS:
            everyone.maximum(array)
        else:
            mpi = load_mpi()
            self.mpi_comm.Allreduce(mpi.IN_PLACE, array, mpi.MAX)

    def pieces(self, buffer: Array) -> Iterator[Array]:
        """Divide a buffer into pieces of 4 MiB."""
        length = _PIECE_BYTES // buffer.itemsize
        for start in range(0, buffer.size, length):
            yield buffer[start : start + length]

    def take_overflow(self) -> float:
        """Return the largest magnitude that became infinite since the last call, or 0."""
        largest, self._adder.overflow = self._adder.overflow, 0.0
        return largest

    def _by_mpi(self, mpi_comm: MPI.Intracomm) -> Reducer:
        return SingleReducer() if mpi_comm.size == 1 else MpiReducer(mpi_comm, self._adder)

    def _by_shared_memory(self, mpi_comm: MPI.Intracomm) -> Reducer:
        size = mpi_comm.size
        takes_turns = size > _RANKS_PER_CORE * cores_of_job() and Futex.is_available()
        n_bytes = (in_turn if takes_turns else shared_memory).bytes_needed(size)
        memory = "" if size == 1 else share_memory(mpi_comm, n_bytes)
        is_lacking = np.array([isinstance(memory, str) and size > 1], np.int64)
        self.maximum(is_lacking)
        if is_lacking.any():
            reasons = self.mpi_comm.allgather(memory if isinstance(memory, str) else "")
            if self.mpi_comm.rank == 0:
                _warn_of_fallback(reasons, n_bytes)
        if is_lacking.any() or isinstance(memory, str):
            return self._by_mpi(mpi_comm)
        # The first rank has decided, since others might count a different number of cores.
        if len(memory) == in_turn.bytes_needed(size):
            return InTurnReducer(mpi_comm, memory, self._adder)
        return SharedMemoryReducer(mpi_comm, memory, self._adder)


def _warn_of_fallback(reasons: Sequence[str], n_bytes: int) -> None:
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
    warnings.warn(
        f"rank {rank} cannot share memory with the other ranks of its host: {reason}. "
        "Gradients travel by MPI instead, which is slower. "
        f"Each communicator needs {n_bytes / 2**20:.1f} MiB of memory that the ranks of a host "
        "share. If they are in different containers, start these with docker run --network=host",
        RuntimeWarning,
        stacklevel=2,
    )


class SingleReducer(Reducer):
    """The reducer of a single rank. It sends nothing, so it rounds nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    @override
    def allreduce(self, array: Array, divisor: int = 1, wire_dtype: Dtype | None = None) -> Steps:
        divide(array, divisor)
        yield from ()

    @override
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        yield from self.allreduce(array, divisor)
        return array

    @override
    def allgather(self, array: Array) -> Steps:
        yield from ()

    @override
    def bcast(self, array: Array) -> Steps:
        yield from ()
