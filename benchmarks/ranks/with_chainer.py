"""Chainer's networks with this ``chainermn``, another version of it, or the original.

Use only public names of the library here, because all versions have these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

import chainermn
from benchmarks.ranks import functions, networks
from benchmarks.ranks.orders import Orders, Pipelined, Repeated, Step
from benchmarks.ranks.with_settings import made_from

# After these, overlap='auto' has decided on several hosts whether overlap pays.
_ITERATIONS_OF_TRIAL = 20
# After these, a step is launched as a CUDA graph.
_FIRST = 8


def run(orders: Orders) -> None:
    orders.obey(lambda what, **options: PREPARE[what](**options))


def exchange(
    network: str, communicator: str | None, on_gpu: bool = False, **settings: Any
) -> Step:
    """Return a step that only exchanges all gradients."""
    comm = chainermn.create_communicator(communicator, **settings)
    device = use_device(comm, on_gpu)
    model = networks.make(network).model
    random = np.random.default_rng(comm.rank)
    for parameter in model.params():
        # Small, like gradients: in float16, half of them are subnormal.
        parameter.grad = random.normal(0, 1e-4, parameter.shape).astype(np.float32)
    model.to_device(device)
    return until_done(lambda: comm.multi_node_mean_grad(model), device)


def iteration(
    network: str,
    batchsize: int,
    communicator: str | None,
    *,
    dtype: str | None = None,
    on_gpu: bool = False,
    mixed: bool = False,
    compares: bool = False,
    graphs: bool | None = None,
    **settings: Any,
) -> Step:
    """Return a whole iteration, or only a comparison of replicas.

    If ``graphs`` is given, the iteration also tells what the first ones cost. Settings are those
    of `make_optimizer`.
    """
    wire: dict[str, Any] = {} if dtype is None else {"allreduce_grad_dtype": dtype}
    comm = chainermn.create_communicator(communicator, **wire)
    device = use_device(comm, on_gpu)
    precision = chainer.mixed16 if mixed else np.float32
    with chainer.using_config("dtype", precision):
        made = networks.make(network)
    model = chainer.links.Classifier(made.model)
    # Neither does PyTorch's step.
    model.compute_accuracy = False
    model.to_device(device)
    optimizer = make_optimizer(comm, mixed, **settings).setup(model)
    x, t = made.examples(batchsize)
    x, t = device.send((x.astype(np.float16 if mixed else np.float32), t))

    def update() -> None:
        with chainer.using_config("dtype", precision):
            optimizer.update(model, x, t)

    step = until_done(update, device)
    if graphs is not None:
        return with_cost(step, optimizer, graphs)
    for _ in range(_ITERATIONS_OF_TRIAL if settings.get("overlap") == "auto" else 1):
        step()
    if compares:
        return until_done(optimizer.compare_replicas, device)
    period = settings.get("local", {}).get("period") or settings.get("accumulate", 1)
    if period > 1:
        return Repeated(step, period)
    return Pipelined(step, optimizer.wait) if settings.get("double_buffering") else step


def with_cost(step: Callable[[], None], optimizer: Any, uses_graphs: bool) -> Step:
    """Return a step that tells seconds of the first steps, and the GPU memory in use."""
    if uses_graphs:
        optimizer.use_cuda_graphs()
    start = time.perf_counter()
    for _ in range(_FIRST):
        step()
    seconds = time.perf_counter() - start
    n_bytes = chainer.backends.cuda.memory_pool.total_bytes()
    if uses_graphs:
        if not optimizer.cuda_graphs.n_launched:
            raise RuntimeError(f"none of the first {_FIRST} steps was launched as a graph")
        n_bytes += optimizer.cuda_graphs.n_bytes
    figures = {f"s for the first {_FIRST} steps": seconds, "MB of GPU memory": n_bytes / 1e6}

    def measured() -> dict[str, Any]:
        step()
        return {"figures": figures}

    return measured


def make_optimizer(comm: Any, mixed: bool = False, rule: str = "SGD", **settings: Any) -> Any:
    """Return an optimizer, with float32 updates and loss scaling in mixed precision.

    ``rule`` is its class; other settings are those of `made_from`.
    """
    optimizer = getattr(chainer.optimizers, rule)(1e-4)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, **made_from(**settings))
    if mixed:
        optimizer.use_fp32_update()
        optimizer.loss_scaling()
    return optimizer


def forward(network: str, batchsize: int, and_backward: bool) -> Step:
    """Return a step that computes a loss and, if wanted, its gradients."""
    chainermn.create_communicator("naive")  # sets threads and memory
    made = networks.make(network)
    x, t = made.examples(batchsize)

    def step() -> None:
        loss = F.softmax_cross_entropy(made.model(x), t)
        if and_backward:
            made.model.cleargrads()
            loss.backward()

    return step


def function(name: str, backward: bool) -> Step:
    """Return a step that computes one function, or its gradients."""
    chainermn.create_communicator("naive")  # sets threads and memory
    return functions.step_of(name, backward)


def use_device(comm: Any, on_gpu: bool) -> Any:
    """Return the CPU or the GPU of this rank. Not all versions have `choose_device`."""
    name = "@numpy"
    if on_gpu:
        # There is only one if each rank sees only its own.
        visible = chainer.backends.cuda.cupy.cuda.runtime.getDeviceCount()
        name = f"@cupy:{comm.intra_rank % visible}"
    device = chainer.get_device(name)
    device.use()
    return device


def until_done(step: Callable[[], None], device: Any) -> Callable[[], None]:
    """Return a step that waits for the GPU, if there is one."""
    if device.xp is np:
        return step

    def synchronized() -> None:
        step()
        chainer.backends.cuda.Stream.null.synchronize()

    return synchronized


PREPARE: dict[str, Callable[..., Step]] = {
    "exchange": exchange,
    "iteration": iteration,
    "forward": forward,
    "function": function,
}
