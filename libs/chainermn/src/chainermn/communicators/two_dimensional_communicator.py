"""Reduce-scatter inside each host, all-reduce of each shard between the hosts, all-gather."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase, in_pieces
from chainermn.communicators.transport.reducer import Steps


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
    def _mean_in_steps(self, buffer: Array) -> Steps:
        if self.inter_size == 1:
            yield from self._reducers.everyone.allreduce(buffer, self.size, self._wire_dtype)
            return
        intra, inter = self._reducers.intra, self._reducers.inter
        for piece in in_pieces(buffer):
            shard = yield from intra.reduce_scatter(piece, divisor=self.size)
            yield from inter.allreduce(shard, wire_dtype=self._wire_dtype)
            yield from intra.allgather(piece)
