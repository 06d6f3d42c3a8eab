"""Reduce arrays in GPU memory: by NCCL inside a host, by MPI between hosts."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from chainermn.transport.gpu.device import Gpu, the_gpu
from chainermn.transport.gpu.nccl import NcclTransport
from chainermn.transport.gpu.staging import Staging
from chainermn.transport.reducer import AllReducer, Array, Dtype, Pending, Reducer, Reducers, Steps

if TYPE_CHECKING:
    from chainermn.transport.gpu.transports import GpuTransports
    from chainermn.transport.host.reducers import HostReducers
    from chainermn.transport.topology import Topology


class GpuReducers(Reducers):
    """Reducers in GPU memory. Each rank must choose its device before it uses one of them.

    ``host`` holds the same ranks' reducers in host memory. The reducer among all ranks uses NCCL
    if ``everyone_by_nccl`` is true, and MPI otherwise.
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
        return GpuMpiReducer(self._host.everyone, the_gpu())

    @cached_property
    def intra(self) -> Reducer:
        """The reducer among the ranks of this host, by NCCL."""
        return NcclReducer(self._transports.connect(self._split(self.topology.inter_rank)))

    @cached_property
    def inter(self) -> AllReducer:
        """The reducer among the ranks that have the same position on their hosts, by MPI."""
        return GpuMpiReducer(self._host.inter, the_gpu())

    @override
    def free(self) -> None:
        for reducer in (self.__dict__.get("everyone"), self.__dict__.get("inter")):
            if isinstance(reducer, GpuMpiReducer):
                reducer.finish()
        super().free()

    def pieces(self, buffer: Array) -> Iterator[Array]:
        """Return the buffer in one piece: these reducers do not need much scratch memory."""
        yield buffer


class NcclReducer(Reducer):
    """Reduces arrays in GPU memory, on the current stream.

    The host never waits: for it, a collective is done once its work is enqueued. NCCL rounds after
    each addition, so 16-bit sums are less exact than those in host memory, and may overflow even
    if the mean would not.
    """

    def __init__(self, transport: NcclTransport) -> None:
        super().__init__(transport.rank, transport.size)
        self._transport = transport

    @override
    def allreduce(self, array: Array, divisor: int = 1, wire_dtype: Dtype | None = None) -> Steps:
        """See `AllReducer.allreduce`. Ignores ``wire_dtype``, which the buffer already has."""
        self._transport.combine(array)
        _divide(array, divisor)
        yield from ()

    @override
    def reduce(self, array: Array, divisor: int = 1) -> Steps:
        self._transport.reduce(array)
        _divide(array, divisor)
        yield from ()

    @override
    def reduce_scatter(self, array: Array, divisor: int = 1) -> Generator[Pending, None, Array]:
        shard = self._transport.reduce_scatter(array)
        _divide(shard, divisor)
        yield from ()
        return shard

    @override
    def allgather(self, array: Array) -> Steps:
        self._transport.allgather(array)
        yield from ()

    @override
    def bcast(self, array: Array) -> Steps:
        self._transport.bcast(array)
        yield from ()


class GpuMpiReducer(AllReducer):
    """All-reduces arrays in GPU memory by MPI, through ``host``, a reducer in host memory.

    MPI itself never sums GPU memory. An Open MPI that was built for CUDA crashes if a non-blocking
    collective does. A blocking one, which also goes through host memory there, would make the
    thread's other exchanges wait.
    """

    def __init__(self, host: AllReducer, gpu: Gpu) -> None:
        super().__init__(host.rank, host.size)
        self._host = host
        self._staging = Staging(gpu)

    @override
    def allreduce(self, array: Array, divisor: int = 1, wire_dtype: Dtype | None = None) -> Steps:
        for ready, chunk in self._staging.chunks(array):
            yield ready
            yield from self._host.allreduce(chunk, divisor, wire_dtype)

    def finish(self) -> None:
        """Wait until the GPU has finished all work of this reducer."""
        self._staging.finish()


def _divide(array: Array, divisor: int) -> None:
    if divisor > 1:
        array /= divisor
