"""Reduce inside each host, all-reduce between the hosts, broadcast inside each host."""

from __future__ import annotations

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase, in_pieces
from chainermn.communicators.transport.reducer import Steps


class HierarchicalCommunicator(MpiCommunicatorBase):
    """Lets one rank of each host speak for the others, so that each byte leaves a host once."""

    @override
    def _mean_in_steps(self, buffer: Array) -> Steps:
        if self.inter_size == 1:
            yield from self._reducers.everyone.allreduce(buffer, self.size, self._wire_dtype)
            return
        intra, inter = self._reducers.intra, self._reducers.inter
        for piece in in_pieces(buffer):
            yield from intra.reduce(piece, divisor=self.size)
            if self.intra_rank == 0:
                yield from inter.allreduce(piece, wire_dtype=self._wire_dtype)
            yield from intra.bcast(piece)
