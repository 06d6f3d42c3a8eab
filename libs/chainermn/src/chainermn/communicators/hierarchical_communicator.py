"""Reduce inside each host, all-reduce between the hosts, broadcast inside each host."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.transport.reducer import Array, Reducers, Steps


class HierarchicalCommunicator(MpiCommunicatorBase):
    """A reduction inside each host, an all-reduce between one rank of each, then a broadcast.

    Each byte leaves a host once. Gradients are rounded only when they travel between hosts.
    """

    @staticmethod
    def average(
        buffer: Array, reducers: Reducers, divisor: int, wire_dtype: np.dtype[Any] | None
    ) -> Steps:
        if reducers.topology.inter_size == 1:
            yield from reducers.everyone.allreduce(buffer, divisor, wire_dtype)
            return
        intra, inter = reducers.intra, reducers.inter
        for piece in reducers.pieces(buffer):
            yield from intra.reduce(piece, divisor)
            if reducers.topology.intra_rank == 0:
                yield from inter.allreduce(piece, wire_dtype=wire_dtype)
            yield from intra.bcast(piece)
