"""Reduce inside each host, all-reduce between the hosts, broadcast inside each host."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class HierarchicalCommunicator(MpiCommunicatorBase):
    """Lets one rank of each host speak for the others, so that each byte leaves a host once."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._intra, self._inter = self._split_by_host()

    @override
    def _allreduce_mean(self, buffer: Array) -> None:
        self._intra.reduce(buffer, root=0, divisor=self.size)
        if self.intra_rank == 0:
            self._inter.allreduce(buffer)
        self._intra.bcast(buffer, root=0)
