"""As hierarchical, for an MPI that cannot read the memory of a GPU."""

from __future__ import annotations

from chainermn.communicators.hierarchical_communicator import HierarchicalCommunicator


class NonCudaAwareCommunicator(HierarchicalCommunicator):
    """Goes between the hosts through host memory, and never tries whether MPI needs that.

    On arrays in host memory there is no difference to `HierarchicalCommunicator`.
    """

    _may_be_direct = False
