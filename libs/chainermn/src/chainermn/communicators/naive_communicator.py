"""One all-reduce for each parameter."""

from __future__ import annotations

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class NaiveCommunicator(MpiCommunicatorBase):
    """One all-reduce for each parameter, in place; GPU memory travels by MPI."""

    bucket_bytes = 0
    everyone_by_nccl = False
