"""Communicate differentiably: variables travel between ranks, and their gradients back."""

from chainermn.functions.batch_normalization import multi_node_batch_normalization
from chainermn.functions.collective_communication import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    reduce_scatter,
    scatter,
)
from chainermn.functions.point_to_point_communication import recv, send
from chainermn.functions.pseudo_connect import pseudo_connect

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather",
    "multi_node_batch_normalization",
    "pseudo_connect",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
