"""Find out whether ranks can use GPUs and NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chainermn.transport.gpu.device import gpu, the_gpu
from chainermn.transport.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI


def why_no_gpu() -> str | None:
    """Return why CUDA cannot be used here, or None if it can."""
    found = gpu()
    if found is None:
        return "CuPy is not installed, or cannot be imported"
    try:
        return None if found.devices() else "there is no CUDA device"
    except RuntimeError as error:  # CuPy's
        return f"CUDA does not answer ({error})"


def why_no_nccl() -> str | None:
    """Return why NCCL cannot be used here, or None if it can."""
    if reason := why_no_gpu():
        return reason
    try:
        the_gpu().nccl()
    except ImportError as error:
        return str(error)
    return None


def any_rank_has_gpu(mpi_comm: MPI.Intracomm) -> bool:
    """Tell whether at least one rank can use a GPU. Collective."""
    return any(mpi_comm.allgather(why_no_gpu() is None))


def why_not_one_each(mpi_comm: MPI.Intracomm, topology: Topology) -> str | None:
    """Return why some rank cannot have its own GPU with NCCL, or None. Collective.

    The answer is the same on all ranks.
    """
    reason, found = why_no_nccl(), gpu()
    visible = found.devices() if found and not reason else []
    everywhere = mpi_comm.allgather((topology.inter_rank, reason, visible))
    for rank, (_, reason, _) in enumerate(everywhere):
        if reason:
            return f"on rank {rank}, {reason}"
    for node, ranks in enumerate(topology.ranks_per_host):
        # A rank may see all GPUs of its host or only its own.
        count = len({device for host, _, seen in everywhere if host == node for device in seen})
        if count < ranks:
            return f"a host has {ranks} ranks, but only {count} GPU{'s' * (count != 1)}"
    return None
