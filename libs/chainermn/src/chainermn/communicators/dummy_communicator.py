"""No exchange at all."""

from __future__ import annotations

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.route import Route
from chainermn.transport.reducer import Steps


class DummyCommunicator(MpiCommunicatorBase):
    """Copies gradients as `FlatCommunicator` does, but exchanges nothing.

    For measuring what the exchange costs. The replicas drift apart: never train with it.
    """

    @override
    def _exchange_in_steps(self, buffer: Array, route: Route) -> Steps:
        yield from ()
