"""One all-reduce for all parameters together."""

from __future__ import annotations

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.transport.reducer import Steps


class FlatCommunicator(MpiCommunicatorBase):
    """Gathers all gradients into one buffer and exchanges that."""

    _bucket_bytes = float("inf")

    @override
    def _mean_in_steps(self, buffer: Array) -> Steps:
        return self._reducers.everyone.allreduce(buffer, self.size, self._wire_dtype)
