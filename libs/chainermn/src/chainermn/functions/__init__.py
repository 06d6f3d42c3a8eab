"""Communicate differentiably: variables travel between ranks, and their gradients back.

All functions take NumPy or CuPy arrays in place of variables.

Every rank must call the collective functions (:func:`allgather`, :func:`allreduce`,
:func:`alltoall`, :func:`bcast`, :func:`gather`, :func:`reduce_scatter`, :func:`scatter`) in the
same order, and run backward through each of them: through at least one of its results. Gradients
are those of the sum of the losses of all ranks. ``xs`` has one entry per rank: a sequence of
variables, or one variable of shape ``(size, ...)``.
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
