"""One all-reduce by NCCL, between GPUs."""

from __future__ import annotations

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class PureNcclCommunicator(MpiCommunicatorBase):
    """One all-reduce by NCCL of all gradients in one buffer; needs a GPU for each rank.

    Its collective calls on arrays in GPU memory use NCCL too, but MPI once gradients are exchanged
    beside the script, by ``double_buffering`` or ``overlap=True``: two collectives of NCCL at a
    time can deadlock. Arrays in host memory, objects, and messages from one rank to another travel
    by MPI. Gradients in GPU memory travel in the dtype
    ``allreduce_grad_dtype`` or, by default, ``chainer.global_config.dtype``; for ``mixed16`` that
    is float16. Gradients in host memory are exchanged as by `FlatCommunicator`.
    """

    uses_nccl = True
    bucket_bytes = float("inf")
