"""One all-reduce for each parameter."""

from __future__ import annotations

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class NaiveCommunicator(MpiCommunicatorBase):
    """Exchanges each gradient by an all-reduce of its own, without copying it."""

    _bucket_bytes = 0

    @override
    def _allreduce_mean(self, buffer: Array) -> None:
        self._transport.allreduce(buffer, "mean")
