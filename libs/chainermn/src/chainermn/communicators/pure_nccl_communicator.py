"""One all-reduce by NCCL, between GPUs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import chainer
import numpy as np
from typing_extensions import override

from chainermn.communicators.messages import Array
from chainermn.communicators.mpi_communicator_base import Carrier, MpiCommunicatorBase
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.communicators.route import Route
from chainermn.transport.gpu.available import why_no_nccl
from chainermn.transport.gpu.device import on_gpu
from chainermn.transport.host.casts import FLOAT16
from chainermn.transport.reducer import Steps


class PureNcclCommunicator(MpiCommunicatorBase):
    """Gathers all gradients into one buffer and lets NCCL add it up, on one host or several.

    Its collective calls on arrays in GPU memory go by NCCL too; what is in host memory, objects,
    and messages from one rank to another by MPI. On the wire gradients have the dtype
    ``allreduce_grad_dtype`` or, without one, ``chainer.global_config.dtype``, and float16 for
    ``mixed16``. Those in host memory are exchanged as by `FlatCommunicator`.

    Raises
    ------
    RuntimeError
        On every rank, with what the first rank that cannot use NCCL lacks.
    ValueError
        If ``allreduce_grad_dtype`` is ``'auto'``, which measures MPI.
    """

    uses_nccl = True
    _bucket_bytes = float("inf")

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for rank, reason in enumerate(self.mpi_comm.allgather(why_no_nccl())):
            if reason:
                raise RuntimeError(
                    f"pure_nccl needs a GPU for each rank: on rank {rank}, {reason}. "
                    "Without GPUs use another communicator, for example 'naive'"
                )
        if self.allreduce_grad_dtype == "auto":
            raise ValueError(
                "pure_nccl: allreduce_grad_dtype='auto' measures MPI, by which nothing travels "
                "here; give a dtype, or None for chainer.global_config.dtype"
            )

    @cached_property
    @override
    def over_mpi(self) -> NaiveCommunicator:
        return NaiveCommunicator(self.mpi_comm, topology=self._topology)

    @property
    @override
    def _gpu_wire_dtype(self) -> np.dtype[Any]:
        chosen = self._wire_dtype
        if chosen is not None:
            return chosen
        dtype = chainer.global_config.dtype
        return FLOAT16 if dtype is chainer.mixed16 else np.dtype(dtype)

    @override
    def finalize(self) -> None:
        if "over_mpi" in self.__dict__:
            self.over_mpi.finalize()
        super().finalize()

    @override
    def _carrier(self, part: Array) -> Carrier:
        # NCCL knows no complex numbers.
        if on_gpu(part) and part.dtype.kind != "c":
            return self._gpu_reducers.nccl
        return super()._carrier(part)

    @override
    def _exchange_in_steps(self, buffer: Array, route: Route) -> Steps:
        return route.reducers.everyone.allreduce(buffer, route.divisor, route.wire_dtype)
