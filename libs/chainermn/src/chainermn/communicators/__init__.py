"""Communicators: groups of ranks, each class with its own way to average gradients."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

from chainermn import failures, global_except_hook
from chainermn.agreement import check_equal
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.extensions_at_work import extension_at_work
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.registry import class_named, default_on_cpu, register, registered
from chainermn.observation.settings import VARIABLE as TIMELINE
from chainermn.observation.settings import Settings
from chainermn.process.cores import divide_cores
from chainermn.process.memory import keep_freed_memory
from chainermn.transport.gpu.available import any_rank_has_gpu, why_not_one_each
from chainermn.transport.gpu.cuda_awareness import VARIABLE as CUDA_AWARE
from chainermn.transport.gpu.cuda_awareness import is_cuda_aware
from chainermn.transport.host.mpi import world
from chainermn.transport.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

__all__ = [
    "CommunicatorBase",
    "MpiCommunicatorBase",
    "create_communicator",
    "register",
    "registered",
]

failures.name_callers_by(extension_at_work)


def create_communicator(
    communicator_name: str | None = None,
    mpi_comm: MPI.Intracomm | None = None,
    *,
    allreduce_grad_dtype: DTypeLike | None = None,
    batched_copy: bool = True,
) -> MpiCommunicatorBase:
    """Create a communicator, and initialise MPI if that has not been done.

    This also divides the cores of each host among its ranks, unless ``OMP_NUM_THREADS`` or the
    like is set; lets each rank keep the memory it has freed, unless ``MALLOC_TRIM_THRESHOLD_`` or
    the like is set; and has an uncaught exception on one rank end the whole job
    (`chainermn.global_except_hook`).

    Parameters
    ----------
    communicator_name : str, optional
        How gradients are averaged: one of the names in `registered`. By default ``pure_nccl`` if
        every rank can have a GPU for itself; otherwise ``single_node`` on one host,
        ``two_dimensional`` on several, or ``hierarchical`` if they have different numbers of
        ranks.
    mpi_comm : mpi4py.MPI.Intracomm, optional
        The ranks that take part; all by default.
    allreduce_grad_dtype : {'float16', 'bfloat16', 'float32', 'float64'}, optional
        Dtype of gradients while they travel. By default they keep their own; with ``pure_nccl``
        it is ``chainer.global_config.dtype``. In host memory, values of 16 bits are added up in
        float32, and rounded once before they leave and once on the way back. Gradients in host
        memory that never leave the host are not rounded.
    batched_copy : bool
        Accepted for scripts written for the original: copies are always batched.

    Returns
    -------
    CommunicatorBase

    Raises
    ------
    ValueError
        On every rank, if the name is unknown or the ranks give different arguments.
    RuntimeError
        If no MPI library can be loaded, or ``mpiexec`` belongs to another MPI.
    """
    global_except_hook.add_hook()
    with contextlib.ExitStack() as stack:
        with failures.starting():
            mpi_comm = world() if mpi_comm is None else mpi_comm
            stack.enter_context(failures.creating(mpi_comm))
            failures.join(mpi_comm)
        arguments = f"{communicator_name!r}, allreduce_grad_dtype={allreduce_grad_dtype!r}"
        if is_cuda_aware():
            arguments += f", {CUDA_AWARE}=1"
        timeline = Settings.from_environment()
        if timeline is not None:
            arguments += f", {TIMELINE}: {timeline!r}"
        check_equal(mpi_comm, arguments, "create_communicator")
        topology = Topology.of(mpi_comm)
        if communicator_name is None:
            lacking = why_not_one_each(mpi_comm, topology)
            communicator_name = default_on_cpu(topology) if lacking else "pure_nccl"
            if lacking and any_rank_has_gpu(mpi_comm) and mpi_comm.rank == 0:
                _warn_of_default(lacking, communicator_name)
        communicator = class_named(communicator_name)(
            mpi_comm,
            allreduce_grad_dtype=allreduce_grad_dtype,
            batched_copy=batched_copy,
            topology=topology,
        )
        divide_cores(mpi_comm, topology.inter_rank)
        keep_freed_memory()
        if timeline is not None:
            from chainermn.observation.timeline_file import record_job

            record_job(mpi_comm, timeline)
    return communicator


def _warn_of_default(reason: str, name: str) -> None:
    warnings.warn(
        f"{reason}: gradients are averaged on the CPU, by the communicator {name!r}. "
        f"create_communicator({name!r}) does the same without this warning",
        stacklevel=3,
    )
