"""One all-reduce for each parameter."""

from __future__ import annotations

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class NaiveCommunicator(MpiCommunicatorBase):
    """One all-reduce for each parameter; MPI also sends gradients in GPU memory."""

    bucket_bytes = 0
    everyone_by_nccl = False
