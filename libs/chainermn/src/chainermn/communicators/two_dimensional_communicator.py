"""Reduce-scatter inside each host, all-reduce of each shard between the hosts, all-gather."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.transport.reducer import Array, Reducers, Steps
from chainermn.transport.topology import Topology


class TwoDimensionalCommunicator(MpiCommunicatorBase):
    """A reduce-scatter inside each host, an all-reduce of each shard between hosts, an all-gather.

    All links between hosts are busy at the same time. It needs the same number of ranks on every
    host. Gradients are rounded only when they travel between hosts.
    """

    @classmethod
    def why_not(cls, topology: Topology) -> str:
        per_host = topology.ranks_per_host
        if len(set(per_host)) == 1:
            return ""
        return (
            "two_dimensional needs the same number of ranks on every host, got "
            f"{', '.join(map(str, per_host))}; use hierarchical, or start the same number on each"
        )

    @staticmethod
    def average(
        buffer: Array, reducers: Reducers, divisor: int, wire_dtype: np.dtype[Any] | None
    ) -> Steps:
        if reducers.topology.inter_size == 1:
            yield from reducers.everyone.allreduce(buffer, divisor, wire_dtype)
            return
        intra, inter = reducers.intra, reducers.inter
        for piece in reducers.pieces(buffer):
            shard = yield from intra.reduce_scatter(piece, divisor)
            yield from inter.allreduce(shard, wire_dtype=wire_dtype)
            yield from intra.allgather(piece)
