"""Reduce-scatter inside each host, all-reduce of each shard between the hosts, all-gather."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class TwoDimensionalCommunicator(MpiCommunicatorBase):
    """Lets every rank of a host carry a shard between the hosts: all links are busy at once.

    Raises
    ------
    ValueError
        On every rank, if the hosts have different numbers of ranks.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        per_host = self._topology.ranks_per_host
        if len(set(per_host)) > 1:
            raise ValueError(
                "two_dimensional needs the same number of ranks on every host, got "
                f"{', '.join(map(str, per_host))}; use hierarchical, or start as many on each"
            )
        self._intra, self._inter = self._split_by_host()

    @override
    def _allreduce_mean(self, buffer: Array) -> None:
        shard = self._intra.reduce_scatter(buffer, divisor=self.size)
        self._inter.allreduce(shard)
        self._intra.allgather(buffer)
