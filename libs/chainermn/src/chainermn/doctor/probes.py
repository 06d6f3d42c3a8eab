"""Probes, which may hang or crash: `probe.ask` calls each function in separate processes.

On several ranks, rank 0 returns the answer, and the others return None.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import time
from collections.abc import Mapping
from time import sleep
from typing import Any

#: Seconds after which a measurement is not repeated, because chance hardly affects it.
_LONG = 0.2
#: Another communicator or dtype is worth it if it takes less than this fraction of the time.
WORTH_IT = 0.8
NO_DEVICE = 100  # error code of the CUDA driver
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # attribute numbers of the CUDA driver


def compat() -> dict[str, Any]:
    """Return versions, the state of chainer-compat's hook, and every repair."""
    from chainer_compat import report

    return report.collect()


def chainer_computes() -> list[str]:
    """Return the names of computations that Chainer gets wrong."""
    import chainer
    import numpy as np

    wrong = []
    linear = chainer.links.Linear(3, 2, initialW=np.arange(6, dtype=np.float32).reshape(2, 3))
    linear.cleargrads()
    y = linear(chainer.Variable(np.array([[1, 2, 3], [4, 5, 6]], np.float32)))
    chainer.functions.sum(y * y).backward()
    if y.array.tolist() != [[8, 26], [17, 62]]:
        wrong.append("the forward pass of a Linear link")
    if linear.W.grad.tolist() != [[152, 202, 252], [548, 724, 900]]:
        wrong.append("the backward pass of a Linear link")
    return wrong


def public_names() -> int:
    """Import every public name of chainermn and its late imports; return the number of names."""
    import ml_dtypes  # noqa: F401
    import threadpoolctl  # noqa: F401

    import chainermn

    for name in chainermn.__all__:
        getattr(chainermn, name)
    return len(chainermn.__all__)


# ---- MPI ----


def _meet(world: Any) -> None:
    """Wait for all ranks, which may still be importing, without using a core.

    In other collectives, MPI spins while it waits. That would slow down the late ranks of hosts
    that share a machine.
    """
    request = world.Ibarrier()
    while not request.Test():
        sleep(0.01)


def ranks() -> list[dict[str, Any]] | None:
    """Return the host, environment and thread level of each rank, in rank order."""
    from mpi4py import MPI

    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in names}
    mine = {
        "host": socket.gethostname(),
        "environment": dict(os.environ),
        "thread level": levels[MPI.Query_thread()],
    }
    _meet(MPI.COMM_WORLD)
    return MPI.COMM_WORLD.gather(mine)


def shared_memory() -> str | None:
    """Return the first reason why a rank of this host cannot share memory; empty if all can."""
    from mpi4py import MPI

    from chainermn.transport.host.memory import share_memory
    from chainermn.transport.host.shared_memory import bytes_needed

    memory = share_memory(MPI.COMM_WORLD, bytes_needed(MPI.COMM_WORLD.size))
    reasons = MPI.COMM_WORLD.gather(memory if isinstance(memory, str) else "")
    return None if reasons is None else next(filter(None, reasons), "")


def communicators() -> dict[str, str] | None:
    """Return an error for each communicator, from any rank; empty if its means are exact."""
    world = communicator("naive", None)
    everywhere = world.gather_obj({name: _try_out(name) for name in usable(world.mpi_comm)})
    if everywhere is None:
        return None
    return {
        name: next(filter(None, (wrong[name] for wrong in everywhere)), "")
        for name in everywhere[0]
    }


def usable(mpi_comm: Any) -> list[str]:
    """Return the names of the communicators that can run on the CPUs of these hosts."""
    from chainermn.communicators import registered
    from chainermn.transport.topology import Topology

    topology = Topology.of(mpi_comm)
    return [
        name
        for name, kind in registered().items()
        if name != "dummy" and not kind.uses_nccl and not kind.why_not(topology)
    ]


@functools.cache
def communicator(name: str, dtype: str | None) -> Any:
    """Create a communicator once for all probes, since that takes long on many hosts."""
    from mpi4py import MPI

    import chainermn

    create = chainermn.create_communicator  # imports Chainer
    _meet(MPI.COMM_WORLD)
    return create(name, allreduce_grad_dtype=dtype)


def _try_out(name: str) -> str:
    try:
        wrong = _wrong_means(communicator(name, None))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"wrong means of {', '.join(wrong)}" if wrong else ""


def _wrong_means(comm: Any) -> list[str]:
    """Return the dtypes for which the means of whole numbers are not exact."""
    import chainer
    import numpy as np

    model = chainer.Chain()
    with model.init_scope():
        for dtype in "float16", "float32", "float64":
            for name, shape in {"matrix": (3, 5), "vector": (40_000,), "number": ()}.items():
                setattr(model, f"{name}_{dtype}", chainer.Parameter(np.zeros(shape, dtype)))
    for parameter in model.params():
        # The mean of the first n odd numbers is n.
        parameter.grad = np.full(parameter.shape, 2 * comm.rank + 1, parameter.dtype)
    comm.multi_node_mean_grad(model)
    wrong = (each for each in model.params() if (each.grad != comm.size).any())
    return sorted({str(parameter.dtype) for parameter in wrong})


def speeds() -> dict[str, list[float]] | None:
    """Return each rank's seconds for a computation, and for 1 MiB to another host and back."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    numbers = np.linspace(0, 1, 100_000)
    computing = []
    for _ in range(20):
        start = time.perf_counter()
        np.sin(numbers)
        computing.append(time.perf_counter() - start)
    _meet(world)
    names = world.allgather(socket.gethostname())
    firsts = [names.index(name) for name in dict.fromkeys(names)]
    network = _network_seconds(world, firsts) if world.rank in firsts else 0.0
    everywhere = world.gather((min(computing), network))
    if everywhere is None:
        return None
    return {
        "computing": [seconds for seconds, _ in everywhere],
        "1 MiB to another host and back": [seconds for _, seconds in everywhere],
    }


def _network_seconds(world: Any, ranks: list[int]) -> float:
    """Return the seconds for an exchange with the fastest of several partners.

    Only a rank that is slow itself is slow with all partners. No rank is in two pairs at a time.
    """
    import numpy as np

    there, back = np.zeros((2, 1 << 20), "u1")
    place, taken = ranks.index(world.rank), []
    for turn in range(min(len(ranks), 5)):
        other = (turn - place) % len(ranks)
        if other != place:
            for size in (1, 1 << 20):  # the first exchange connects and waits for the partner
                start = time.perf_counter()
                pair = {"dest": ranks[other], "recvbuf": back[:size], "source": ranks[other]}
                world.Sendrecv(there[:size], **pair)
            taken.append(time.perf_counter() - start)
    return min(taken)


def exchange() -> dict[str, Any] | None:
    """Return seconds for 1 MiB of gradients by communicator and wire dtype, and the best choice.

    Only the best communicator is also measured in bfloat16.
    """
    from chainermn.communicators.registry import default_on_cpu
    from chainermn.transport.topology import Topology

    world = communicator("naive", None)
    names = usable(world.mpi_comm)
    seconds = {name: {"float32": _seconds(world, 512, name)} for name in names}
    default = default_on_cpu(Topology.of(world.mpi_comm))
    use = world.bcast_obj(choose({name: seconds[name]["float32"] for name in names}, default))
    seconds[use]["bfloat16"] = _seconds(world, 512, use, "bfloat16")
    return {"use": use, "seconds": seconds} if world.rank == 0 else None


def choose(seconds: Mapping[str, float], default: str) -> str:
    """Return the fastest communicator, or the default unless that is clearly slower."""
    fastest = min(seconds, key=lambda name: seconds[name])
    return fastest if seconds[fastest] < WORTH_IT * seconds[default] else default


def settings() -> dict[str, list[tuple[int, float]]] | None:
    """Return seconds for few and for many gradients by setting, with the default communicator."""
    from chainermn.communicators.registry import default_on_cpu
    from chainermn.compression import PowerSGD
    from chainermn.transport.topology import Topology

    world = communicator("naive", None)
    name = default_on_cpu(Topology.of(world.mpi_comm))
    # Large enough to take longer than latency and noise, even when compressed.
    tried: dict[str, tuple[int, str | None, Any]] = {
        "float32": (1024, None, None),
        "allreduce_grad_dtype='bfloat16'": (1024, "bfloat16", None),
        "compression=chainermn.compression.PowerSGD(rank=4)": (2048, None, PowerSGD(rank=4)),
    }
    seconds = {
        setting: [(side**2, _seconds(world, side, name, *how)) for side in (32, many)]
        for setting, (many, *how) in tried.items()
    }
    return seconds if world.rank == 0 else None


def _seconds(
    world: Any, side: int, name: str, dtype: str | None = None, compression: Any = None
) -> float:
    """Return the seconds to exchange the gradient of a square matrix."""
    import chainer
    import numpy as np

    from chainermn.gradients.compressor import Compressor

    comm = communicator(name, dtype)
    model = chainer.Chain()
    with model.init_scope():
        model.weight = chainer.Parameter(np.zeros((side, side), np.float32))
    model.weight.grad = np.ones_like(model.weight.array)
    compressor = None if compression is None else Compressor(compression)
    taken = []
    for _ in range(4):
        world.mpi_comm.Barrier()
        start = time.perf_counter()
        comm.gradients.mean(model, zero_fill=False, compressor=compressor)
        taken.append(time.perf_counter() - start)
        if world.bcast_obj(taken[-1] > _LONG):
            break
    return min(taken[1:] or taken)  # the first sets up buffers


# ---- GPUs ----


def cuda() -> dict[str, Any]:
    """Return the newest CUDA that the driver supports, its GPUs, and any error.

    Compute capabilities are whole numbers, such as 75 for 7.5.
    """
    gpus: list[str] = []
    capabilities: list[int] = []
    answer = {"cuda": "", "error": "", "gpus": gpus, "capabilities": capabilities}
    try:  # with ctypes, because CuPy may be missing
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return answer
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    answer["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if code := driver.cuInit(0):
        return {**answer, "error": "" if code == NO_DEVICE else f"cuInit fails with error {code}"}
    driver.cuDeviceGetCount(ctypes.byref(count))
    for number in range(count.value):
        name = ctypes.create_string_buffer(100)
        driver.cuDeviceGetName(name, 100, number)
        gpus.append(name.value.decode())
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, number)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, number)
        capabilities.append(10 * major.value + minor.value)
    return answer


def cupy_and_nccl() -> dict[str, str]:
    """Return the versions of CuPy, CUDA and NCCL, or the reason why there is no NCCL."""
    import cupy

    runtime = cupy.cuda.runtime.runtimeGetVersion()
    cupy.arange(1000).sum().get()  # raises if CuPy cannot compile for this GPU
    answer = {
        "version": str(cupy.__version__),
        "runtime": f"{runtime // 1000}.{runtime % 1000 // 10}",
        "nccl": "",
        "nccl error": "",
    }
    try:
        from cupy.cuda import nccl

        number = nccl.get_version()
        answer["nccl"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    except Exception as error:
        answer["nccl error"] = f"{type(error).__name__}: {error}"
    return answer


def device_memory() -> bool | None:
    """Return whether MPI moves GPU memory correctly on all ranks; MPI may crash if it cannot.

    This uses the same code as training with ``CHAINERMN_CUDA_AWARE=1``.
    """
    import cupy
    from mpi4py import MPI

    from chainermn.transport.gpu.device import the_gpu
    from chainermn.transport.gpu.staging import CHUNK_BYTES, Direct
    from chainermn.transport.gpu.transports import GpuMpiTransport
    from chainermn.transport.host.mpi import MpiTransport

    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    transport = GpuMpiTransport(MpiTransport(world), Direct(the_gpu()))
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    is_right = True
    for dtype in "float32", "float64":
        # Two and a half chunks.
        numbers = cupy.arange(5 * CHUNK_BYTES // (2 * cupy.dtype(dtype).itemsize), dtype=dtype)
        own, received = numbers + world.rank, cupy.zeros_like(numbers)
        transport.sendrecv(own, right, received, left)
        is_right &= bool((received == numbers + left).all())
        transport.bcast(own)
        is_right &= bool((own == numbers).all())
        if world.rank == 0:
            transport.send(own, right)
        elif world.rank == 1:
            transport.recv(received, left)
            is_right &= bool((received == numbers).all())
    return world.reduce(is_right, MPI.LAND)
