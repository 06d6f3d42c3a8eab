"""Give each rank a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import chainer

from chainermn.agreement import run_together
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.transport.gpu.available import why_no_gpu
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.host.mpi import host_name


def choose_device(comm: CommunicatorBase, gpu: bool = True) -> chainer.backend.Device:
    """Let this rank compute on a GPU of its own, or on the CPU.

    The ranks of a host share the GPUs that they see, whether each sees all of the host's or only
    its own, as under Slurm's ``--gpus-per-task``. If there are more ranks than GPUs, several use
    the same one, which NCCL refuses. Collective.

    Parameters
    ----------
    comm : CommunicatorBase
        All ranks of the job.
    gpu : bool
        Whether to choose a GPU; otherwise it is the CPU.

    Returns
    -------
    chainer.backend.Device
        Already in use, as by its method ``use``.

    Raises
    ------
    RuntimeError
        On every rank, if a rank that is to use a GPU cannot.
    """
    seen = run_together(comm, "choose_device", lambda: _visible_gpus() if gpu else [])
    everywhere = comm.allgather_obj((comm.inter_rank, seen))
    of_host = [gpus for host, gpus in everywhere[: comm.rank] if host == comm.inter_rank]
    number = _number_of_last([*of_host, seen])
    name = "@numpy" if number is None else f"@cupy:{number}"
    return run_together(comm, "choose_device", lambda: _use(name))


def _visible_gpus() -> list[str]:
    """Return the addresses of the GPUs that this process sees; raise if there are none."""
    if reason := why_no_gpu():
        raise RuntimeError(
            f"no GPU can be used on {host_name()}: {reason}. Run `chainermn doctor` there, or "
            "train on the CPU: choose_device(comm, gpu=False); in the apps, leave out --gpu"
        )
    return the_gpu().devices()


def _number_of_last(visible: Sequence[Sequence[str]]) -> int | None:
    """Return which of its GPUs the last rank takes, if all take the least used one in turn."""
    ranks: Counter[str] = Counter()
    number = None
    for gpus in visible:
        number = min(range(len(gpus)), key=lambda each: ranks[gpus[each]], default=None)
        if number is not None:
            ranks[gpus[number]] += 1
    return number


def _use(name: str) -> chainer.backend.Device:
    device = chainer.get_device(name)
    device.use()
    return device
