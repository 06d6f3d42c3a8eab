"""The hierarchical algorithm for an MPI that cannot read GPU memory."""

from __future__ import annotations

from chainermn.communicators.hierarchical_communicator import HierarchicalCommunicator


class NonCudaAwareCommunicator(HierarchicalCommunicator):
    """The same as ``hierarchical``, but never gives GPU memory to MPI."""

    may_be_cuda_aware = False
