"""Differentiable communication: variables travel between ranks, and their gradients travel back.

All functions also accept NumPy and CuPy arrays instead of variables.

Every rank must call the collective functions (:func:`allgather`, :func:`allreduce`,
:func:`alltoall`, :func:`bcast`, :func:`gather`, :func:`reduce_scatter`, :func:`scatter`) in the
same order. Every rank must also run backward through at least one result of each call. The
gradients are those of the sum of the losses of all ranks.
"""

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
