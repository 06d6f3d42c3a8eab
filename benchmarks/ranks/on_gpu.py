"""What is measured on GPUs, by CUDA events: ``python -m benchmarks.ranks.on_gpu FILE ROUNDS``.

Every rank takes a GPU of its own; rank 0 writes what it has measured into FILE, as JSON.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

import chainermn
from benchmarks.harness import Measured
from benchmarks.networks import GRADIENT_BYTES, TITLES
from benchmarks.ranks import networks
from benchmarks.report import Group
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

Step = Callable[[], Any]

NETWORKS = ("mlp", "resnet50")
BATCHSIZES = {"mlp": 100, "resnet50": 32}
COMMUNICATORS = ("single_node", "hierarchical", "two_dimensional", "flat", "naive")
# So that one turn takes long against the resolution of an event.
STEPS_A_TURN = 10
STEPS_BEFORE = 3
COPIED_BYTES = 1 << 30


def main() -> None:
    file, rounds = Path(sys.argv[1]), int(sys.argv[2])
    comm = chainermn.create_communicator("pure_nccl")
    chainer.get_device(f"@cupy:{comm.intra_rank}").use()
    chainer.global_config.use_cudnn = "never"  # but in the steps that say so
    bandwidth = copy_bandwidth(comm, rounds)
    groups = [group for name in NETWORKS for group in measure(comm, name, rounds, bandwidth)]
    if comm.rank == 0:
        file.write_text(json.dumps([asdict(group) for group in groups]))


def measure(
    comm: MpiCommunicatorBase, network: str, rounds: int, bandwidth: float
) -> Iterator[Group]:
    """Measure copies, exchanges and iterations with the gradients of one network."""
    ranks = f"{comm.size} {'rank' if comm.size == 1 else 'ranks'}"
    title = f"{TITLES[network]}, {GRADIENT_BYTES[network] / 1e6:.1f} MB"
    model = networks.make(network).model
    initialise(model, network)
    model.to_gpu()
    parameters = sorted_parameters(model)
    for wire in ("float32", "float16"):
        rows = in_turn(comm, copies(comm, parameters, wire), rounds)
        key = {"network": network, "what": f"copies, {wire}"}
        group = Group(f"Gather and scatter, {wire} on the wire: {title}", key, rows, rows[-1].name)
        n = sum(parameter.size for parameter in parameters)
        group.reference = 2 * n * (4 + np.dtype(wire).itemsize) / bandwidth
        group.reference_is = (
            "the bytes that are read and written over the bandwidth of a copy of 1 GiB, "
            f"{bandwidth / 1e12:.2f} TB/s, counting reads and writes"
        )
        yield group
    rows = in_turn(comm, exchanges(comm, parameters), rounds)
    key = {"network": network, "what": "exchange"}
    yield Group(f"Exchange, {ranks}: {title}", key, rows, "raw NCCL all-reduce")
    rows = in_turn(comm, iterations(comm, network), rounds)
    for row in rows:
        if row.seconds:
            row.more["examples/s a rank"] = BATCHSIZES[network] / row.median
    key = {"network": network, "what": "iteration"}
    yield Group(f"Iterations, {ranks}: {title}", key, rows, "ours without exchange")


def initialise(model: chainer.Link, network: str) -> None:
    """Give every parameter its values, and a gradient."""
    x, _ = networks.make(network).examples(1)
    with chainer.no_backprop_mode(), chainer.using_config("train", False):
        model(x)
    for parameter in model.params():
        parameter.grad = np.full_like(parameter.array, 1e-4)


def sorted_parameters(model: chainer.Link) -> list[chainer.Parameter]:
    return [parameter for _, parameter in sorted(model.namedparams(), key=lambda pair: pair[0])]


def copies(
    comm: MpiCommunicatorBase, parameters: list[chainer.Parameter], wire: str
) -> dict[str, Step]:
    """Return our gather and scatter, and plain copies of as many elements there and back."""
    cupy = chainer.backends.cuda.cupy
    n = sum(parameter.size for parameter in parameters)
    source, target = cupy.zeros(n, np.float32), cupy.empty(n, np.float32)

    def gather_and_scatter() -> None:
        for _ in comm._gpu_buckets.exchange(parameters, np.dtype(wire)):
            pass

    def copy() -> None:
        target[...] = source
        source[...] = target

    return {"ours": gather_and_scatter, "two copies in float32": copy}


def exchanges(
    comm: MpiCommunicatorBase, parameters: list[chainer.Parameter]
) -> dict[str, Step | str]:
    """Return exchanges of all gradients by us, and the all-reduce of as many bytes by NCCL."""
    cupy = chainer.backends.cuda.cupy
    buffer = cupy.zeros(sum(parameter.size for parameter in parameters), np.float32)
    found: dict[str, Step | str] = {
        "raw NCCL all-reduce": lambda: comm._gpu_reducers.nccl.combine(buffer),
        "ours pure_nccl": lambda: comm._average_on_gpu(parameters),
    }
    for name in COMMUNICATORS:
        try:
            other = chainermn.create_communicator(name, comm.mpi_comm)
        except ValueError as error:  # on several hosts
            found[f"ours {name}"] = str(error)
            continue
        found[f"ours {name}"] = functools.partial(other._average_on_gpu, parameters)
    return found


def iterations(comm: MpiCommunicatorBase, network: str) -> dict[str, Step | str]:
    """Return whole iterations with and without the exchange, and PyTorch's without."""
    cupy = chainer.backends.cuda.cupy
    made = networks.make(network)
    x, t = made.examples(BATCHSIZES[network])
    model = chainer.links.Classifier(made.model)
    model.to_gpu()
    x, t = cupy.asarray(x), cupy.asarray(t)
    optimizer = chainer.optimizers.SGD(1e-4).setup(model)

    def iterate(exchange: bool) -> None:
        loss = model(x, t)
        model.cleargrads()
        loss.backward()
        if exchange:
            comm._average_on_gpu(sorted_parameters(model))
        optimizer.update()

    twin = model.copy(mode="copy")
    overlapping = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(1e-4), comm, overlap=True
    ).setup(twin)

    found: dict[str, Step | str] = {
        "ours without exchange": lambda: iterate(False),
        "ours": lambda: iterate(True),
        "ours, overlapped": lambda: overlapping.update(twin, x, t),
        "ours, forward alone": lambda: F.sum(model(x, t)),
        "ours with cuDNN, without exchange": by_cudnn(lambda: iterate(False)),
    }
    found["PyTorch with cuDNN, alone"] = by_torch(network)
    return found


def by_cudnn(step: Step) -> Step | str:
    """Return the step by chainer-compat's cuDNN, or why it cannot be."""
    if importlib.util.find_spec("cudnn") is None:
        return "it is not installed; pip install 'chainer-compat[cudnn13]'"

    def with_cudnn() -> None:
        with chainer.using_config("use_cudnn", "auto"):
            step()

    try:
        with_cudnn()
    except RuntimeError as error:  # the other figures are worth having
        return f"it fails: {error}"
    return with_cudnn


def by_torch(network: str) -> Step | str:
    """Return an iteration of PyTorch's, or why there is none."""
    try:
        import torch
    except ImportError:
        return "it is not installed; pip install torch"
    if not torch.cuda.is_available():
        return "this PyTorch does not see a GPU"
    from benchmarks.ranks.with_torch import MAKERS

    device = torch.device("cuda", chainer.backends.cuda.Device().id)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    # Its work has to be on the stream that the events are on.
    torch.cuda.set_stream(torch.cuda.default_stream(device))
    model = MAKERS[network]().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    inputs, targets = networks.make(network).examples(BATCHSIZES[network])
    x, t = torch.from_numpy(inputs).to(device), torch.from_numpy(targets).long().to(device)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), t).backward()
        optimizer.step()

    return step


def copy_bandwidth(comm: MpiCommunicatorBase, rounds: int) -> float:
    """Return bytes a second of a large copy in GPU memory, counting reads and writes."""
    cupy = chainer.backends.cuda.cupy
    source, target = cupy.zeros(COPIED_BYTES, np.uint8), cupy.empty(COPIED_BYTES, np.uint8)

    def copy() -> None:
        target[...] = source

    (row,) = in_turn(comm, {"copy": copy}, rounds)
    return 2 * COPIED_BYTES / row.median


def in_turn(
    comm: MpiCommunicatorBase, steps: dict[str, Step] | dict[str, Step | str], rounds: int
) -> list[Measured]:
    """Measure steps one after the other, all of them once a round; a str is why one cannot."""
    rows = {name: Measured(name) for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            if isinstance(step, str):
                rows[name].skipped = step
                continue
            seconds = seconds_of(comm, step)
            if round_ > 0:  # the first one compiles, allocates and connects
                rows[name].seconds.append(seconds)
    return list(rows.values())


def seconds_of(comm: MpiCommunicatorBase, step: Step) -> float:
    """Return how long the GPU takes for a step, on the slowest rank."""
    cuda = chainer.backends.cuda.cupy.cuda
    for _ in range(STEPS_BEFORE):
        step()
    start, end = cuda.Event(), cuda.Event()
    cuda.get_current_stream().synchronize()
    comm.mpi_comm.Barrier()
    start.record()
    for _ in range(STEPS_A_TURN):
        step()
    end.record()
    end.synchronize()
    mine = cuda.get_elapsed_time(start, end) / 1e3 / STEPS_A_TURN
    return float(max(comm.mpi_comm.allgather(mine)))


if __name__ == "__main__":
    main()
