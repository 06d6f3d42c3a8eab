"""One all-reduce among the ranks of one host."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.route import Route
from chainermn.transport.reducer import Steps


class SingleNodeCommunicator(MpiCommunicatorBase):
    """For jobs that are known to run on one host only.

    Raises
    ------
    ValueError
        On every rank, if they run on several hosts.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.inter_size > 1:
            raise ValueError(
                f"single_node is for one host, but the {self.size} ranks run on "
                f"{self.inter_size}; use another communicator, or start all ranks on one host"
            )

    @override
    def _exchange_in_steps(self, buffer: Array, route: Route) -> Steps:
        return route.reducers.everyone.allreduce(buffer, route.divisor, route.wire_dtype)
