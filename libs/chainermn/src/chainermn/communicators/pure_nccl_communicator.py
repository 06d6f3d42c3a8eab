"""One all-reduce by NCCL, between GPUs."""

from __future__ import annotations

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class PureNcclCommunicator(MpiCommunicatorBase):
    """One all-reduce by NCCL of all gradients in one buffer; needs a GPU for each rank.

    Its collective calls on arrays in GPU memory use NCCL too. They use MPI as soon as gradients
    are exchanged in the background, with ``double_buffering`` or ``overlap=True``, because two
    NCCL collectives at the same time can deadlock. Arrays in host memory, objects and
    point-to-point messages always use MPI.

    Gradients in GPU memory are sent as ``allreduce_grad_dtype`` or, by default, as
    ``chainer.global_config.dtype``, which means float16 for ``mixed16``. Gradients in host memory
    are exchanged as in `FlatCommunicator`.
    """

    uses_nccl = True
    bucket_bytes = float("inf")
