"""One all-reduce for all parameters together."""

from __future__ import annotations

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class FlatCommunicator(MpiCommunicatorBase):
    """One all-reduce of all gradients in one buffer; MPI also sends gradients in GPU memory."""

    bucket_bytes = float("inf")
    everyone_by_nccl = False
