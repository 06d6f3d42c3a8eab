"""Choose a device for each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import chainer

from chainermn.agreement import run_together
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.transport.gpu.available import why_no_gpu
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.topology import host_name


def choose_device(comm: CommunicatorBase, gpu: bool = True) -> chainer.backend.Device:
    """Choose a GPU for each rank, or the CPU, and use it from now on. Collective.

    The GPUs of a host are divided among its ranks. This also works if each rank sees only its
    own GPU, as with Slurm's ``--gpus-per-task``. With more ranks than GPUs, several ranks share
    a GPU; NCCL does not support that.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of all ranks of the job.
    gpu : bool
        Whether to choose a GPU instead of the CPU. Ranks may differ.

    Returns
    -------
    chainer.backend.Device
        Device of this rank, on which its ``use`` has been called.

    Raises
    ------
    RuntimeError
        On every rank, if a rank with ``gpu=True`` cannot use a GPU.

    Examples
    --------
    >>> device = chainermn.choose_device(comm, gpu=False)
    >>> device
    <CpuDevice (numpy)>
    >>> model.to_device(device)
    <chainer.links...Classifier object at 0x...>
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
