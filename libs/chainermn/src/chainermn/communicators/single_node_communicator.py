"""One all-reduce among the ranks of one host."""

from __future__ import annotations

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.transport.topology import Topology


class SingleNodeCommunicator(MpiCommunicatorBase):
    """One all-reduce for each large gradient, one for small ones together; on one host only."""

    @classmethod
    def why_not(cls, topology: Topology) -> str:
        if topology.inter_size == 1:
            return ""
        return (
            f"single_node is for one host, but the {topology.size} ranks run on "
            f"{topology.inter_size}; use another communicator, or start all ranks on one host"
        )
