"""Reduce inside each host, all-reduce between the hosts, broadcast inside each host."""

from __future__ import annotations

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.route import Route
from chainermn.transport.reducer import Steps


class HierarchicalCommunicator(MpiCommunicatorBase):
    """Lets one rank of each host speak for the others, so that each byte leaves a host once."""

    @override
    def _exchange_in_steps(self, buffer: Array, route: Route) -> Steps:
        if self.inter_size == 1:
            yield from route.reducers.everyone.allreduce(buffer, route.divisor, route.wire_dtype)
            return
        intra, inter = route.reducers.intra, route.reducers.inter
        for piece in route.reducers.pieces(buffer):
            yield from intra.reduce(piece, route.divisor)
            if self.intra_rank == 0:
                yield from inter.allreduce(piece, wire_dtype=route.wire_dtype)
            yield from intra.bcast(piece)
