"""Whether MPI reads and writes GPU memory itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from chainermn.doctor.probe import ask, probe_command
from chainermn.launch.mpiexec import launch_settings, mpiexec_command

if TYPE_CHECKING:
    from mpi4py import MPI

_SECONDS = 40.0
# By which a launcher tells a process that it is a rank: the ranks of a job of its own must not
# inherit them.
_LAUNCHERS = ("PMI", "PRTE", "OMPI_COMM", "OMPI_MCA_ess", "OMPI_MCA_orte", "HYDI", "HYDRA")

# What was found in this process, which cannot change: empty if MPI is CUDA-aware, else why not.
_found: list[str] = []


def why_not_cuda_aware(mpi_comm: MPI.Intracomm, node: int) -> str:
    """Return why MPI cannot take arrays in GPU memory, or an empty string. Collective.

    An MPI that cannot crashes, and one that says it can may still not. So one rank of each host
    starts a small job that lets MPI add up GPU memory, once for the life of this process.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
    node : int
        Number of the host of this rank.

    Returns
    -------
    str
        The same on all ranks.
    """
    if all(mpi_comm.allgather(bool(_found))):
        return _found[0]
    nodes = mpi_comm.allgather(node)
    reason = _try_out() if nodes.index(node) == mpi_comm.rank else ""
    reasons = mpi_comm.allgather(reason)
    _found[:] = [next(filter(None, reasons), "")]
    return _found[0]


def _try_out() -> str:
    try:
        program = probe_command("device_memory", _SECONDS)
        command = mpiexec_command(2, program, python=False)
        settings = launch_settings()
    except (OSError, RuntimeError, ValueError) as error:
        return str(error)
    own = {name: os.environ[name] for name in os.environ if not name.startswith(_LAUNCHERS)}
    outcome = ask(command, _SECONDS, {**settings, **own})
    if outcome.failure:
        return f"a job that tries it {outcome.failure}"
    return "" if outcome.answer == "right" else "it adds up GPU memory and gets wrong numbers"
