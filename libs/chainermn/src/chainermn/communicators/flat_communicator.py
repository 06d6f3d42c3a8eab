"""One all-reduce for all parameters together."""

from __future__ import annotations

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class FlatCommunicator(MpiCommunicatorBase):
    """Gathers all gradients into one buffer and exchanges that."""

    @override
    def _allreduce_mean(self, buffer: Array) -> None:
        self._transport.allreduce(buffer, "mean")
