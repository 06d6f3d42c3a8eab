"""One all-reduce for each parameter."""

from __future__ import annotations

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.route import Route
from chainermn.transport.reducer import Steps


class NaiveCommunicator(MpiCommunicatorBase):
    """Exchanges each gradient by an all-reduce of its own, without copying it."""

    _bucket_bytes = 0
    _everyone_by_nccl = False

    @override
    def _exchange_in_steps(self, buffer: Array, route: Route) -> Steps:
        return route.reducers.everyone.allreduce(buffer, route.divisor, route.wire_dtype)
