"""One all-reduce by NCCL, between GPUs."""

from __future__ import annotations

from typing import Any

from chainermn.communicators.gpus import why_no_gpu
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class PureNcclCommunicator(MpiCommunicatorBase):
    """Not implemented yet: refuses, and says what to use instead.

    Raises
    ------
    RuntimeError
        On every rank, with what the first rank that cannot use NCCL lacks.
    """

    uses_nccl = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for rank, reason in enumerate(self.mpi_comm.allgather(why_no_gpu())):
            if reason:
                raise RuntimeError(
                    f"pure_nccl needs a GPU for each rank: on rank {rank}, {reason}. "
                    "Without GPUs use another communicator, for example 'naive'"
                )
        raise RuntimeError(
            "this version of chainermn does not train on GPUs yet; "
            "use another communicator, for example 'naive'"
        )
