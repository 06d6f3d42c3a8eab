"""One all-reduce for each parameter."""

from __future__ import annotations

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.transport.reducer import Steps


class NaiveCommunicator(MpiCommunicatorBase):
    """Exchanges each gradient by an all-reduce of its own, without copying it."""

    _bucket_bytes = 0

    @override
    def _mean_in_steps(self, buffer: Array) -> Steps:
        return self._reducers.everyone.allreduce(buffer, self.size, self._wire_dtype)
