"""Communicators: groups of ranks, each class with its own way to average gradients."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING

from chainermn import failures, global_except_hook
from chainermn.agreement import check_equal
from chainermn.arguments import check_has
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.extensions_at_work import extension_at_work
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.registry import class_named, default_on_cpu, register, registered
from chainermn.process.cores import divide_cores
from chainermn.process.memory import keep_freed_memory
from chainermn.process.streams import prepare_streams
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
    """Create a communicator, and initialize MPI if necessary.

    Call it at the start of your script. It also

    - makes an uncaught exception on one rank end the whole job, see
      `chainermn.global_except_hook`;
    - divides the cores of each host among its ranks, unless a variable such as
      ``OMP_NUM_THREADS`` is set;
    - lets each rank keep the memory that it has freed, unless a variable such as
      ``MALLOC_TRIM_THRESHOLD_`` is set;
    - makes standard output escape characters that its encoding lacks, which would end the job.

    Parameters
    ----------
    communicator_name : str, optional
        Algorithm that averages gradients: one of the names in `registered`. The default is
        ``pure_nccl`` if every rank can have its own GPU. Otherwise it is ``single_node`` on one
        host, ``two_dimensional`` on several hosts with the same number of ranks, and
        ``hierarchical`` if they have different numbers of ranks.
    mpi_comm : mpi4py.MPI.Intracomm, optional
        MPI communicator of the ranks that take part; all ranks by default.
    allreduce_grad_dtype : {'float16', 'bfloat16', 'float32', 'float64'}, optional
        Dtype in which gradients are sent. By default they keep their own dtype; with
        ``pure_nccl`` the default is ``chainer.global_config.dtype``. In host memory, 16-bit
        values are added up in float32, and rounded twice: before they are sent and before they
        are sent back. Gradients in host memory that stay on one host are not rounded.
    batched_copy : bool
        Ignored, because copies are always batched; accepted for scripts written for the original
        ChainerMN.

    Returns
    -------
    CommunicatorBase
        Communicator of all ranks, or of those in ``mpi_comm``.

    Raises
    ------
    TypeError
        If the name is not a string, or ``mpi_comm`` is not a communicator of mpi4py.
    ValueError
        On every rank, if the name is unknown, or if ranks pass different arguments.
    RuntimeError
        If no MPI library can be loaded, or if ``mpiexec`` belongs to another MPI.

    Examples
    --------
    >>> comm = chainermn.create_communicator()
    >>> comm.rank, comm.size
    (0, 2)
    (1, 2)

    Choose an algorithm, and send gradients in 16 bits:

    >>> comm = chainermn.create_communicator("flat", allreduce_grad_dtype="float16")
    """
    prepare_streams()
    global_except_hook.add_hook()
    if not isinstance(communicator_name, str | None):
        raise TypeError(
            "create_communicator: expected the name of an algorithm, such as 'flat', got "
            f"{communicator_name!r}; a communicator of mpi4py is passed as mpi_comm=..."
        )
    if mpi_comm is not None:
        check_has("create_communicator", mpi_comm, "a communicator of mpi4py", "Get_group")
    with contextlib.ExitStack() as stack:
        with failures.starting():
            mpi_comm = world() if mpi_comm is None else mpi_comm
            stack.enter_context(failures.creating(mpi_comm))
            failures.join(mpi_comm)
        arguments = f"{communicator_name!r}, allreduce_grad_dtype={allreduce_grad_dtype!r}"
        if is_cuda_aware():
            arguments += f", {CUDA_AWARE}=1"
        timeline = []
        if os.environ.get("CHAINERMN_TIMELINE"):
            variables = sorted(f"{name}={value}" for name, value in os.environ.items() if value)
            timeline = [each for each in variables if each.startswith("CHAINERMN_TIMELINE")]
        check_equal(mpi_comm, ", ".join([arguments, *timeline]), "create_communicator")
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
        if timeline:
            from chainermn.profiling.timeline_file import record_job

            record_job(mpi_comm)
    return communicator


def _warn_of_default(reason: str, name: str) -> None:
    warnings.warn(
        f"{reason}: gradients are averaged on the CPU, by the communicator {name!r}. "
        f"create_communicator({name!r}) does the same without this warning",
        stacklevel=3,
    )
