"""Reduce-scatter inside each host, all-reduce of each shard between the hosts, all-gather."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.route import Route
from chainermn.transport.reducer import Steps


class TwoDimensionalCommunicator(MpiCommunicatorBase):
    """Lets every rank of a host carry a shard between the hosts: all links are busy at once.

    Raises
    ------
    ValueError
        On every rank, if the hosts have different numbers of ranks.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        per_host = self._topology.ranks_per_host
        if len(set(per_host)) > 1:
            raise ValueError(
                "two_dimensional needs the same number of ranks on every host, got "
                f"{', '.join(map(str, per_host))}; use hierarchical, or start as many on each"
            )

    @override
    def _exchange_in_steps(self, buffer: Array, route: Route) -> Steps:
        if self.inter_size == 1:
            yield from route.reducers.everyone.allreduce(buffer, route.divisor, route.wire_dtype)
            return
        intra, inter = route.reducers.intra, route.reducers.inter
        for piece in route.reducers.pieces(buffer):
            shard = yield from intra.reduce_scatter(piece, route.divisor)
            yield from inter.allreduce(shard, wire_dtype=route.wire_dtype)
            yield from intra.allgather(piece)
