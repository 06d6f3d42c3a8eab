"""Chainer's networks, with our ``chainermn`` or, if the hook leaves it in place, the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

import chainermn
from benchmarks.ranks import networks
from benchmarks.ranks.orders import Orders, Pipelined, Step


def run(orders: Orders) -> None:
    orders.obey(lambda what, **options: PREPARE[what](**options))


def exchange(network: str, communicator: str | None, **settings: Any) -> Step:
    """Return the exchange of all gradients, and nothing else."""
    comm = chainermn.create_communicator(communicator, **settings)
    model = networks.make(network).model
    random = np.random.default_rng(comm.rank)
    for parameter in model.params():
        # As small as gradients are: as float16, half of them are subnormal.
        parameter.grad = random.normal(0, 1e-4, parameter.shape).astype(np.float32)
    return lambda: comm.multi_node_mean_grad(model)


def iteration(
    network: str, batchsize: int, communicator: str, dtype: str | None = None, **settings: Any
) -> Step:
    """Return a whole iteration; `settings` are those of ``create_multi_node_optimizer``."""
    wire: dict[str, Any] = {} if dtype is None else {"allreduce_grad_dtype": dtype}
    comm = chainermn.create_communicator(communicator, **wire)
    made = networks.make(network)
    model = chainer.links.Classifier(made.model)
    optimizer = chainer.optimizers.SGD(1e-4)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, **settings)
    optimizer.setup(model)
    x, t = made.examples(batchsize)
    step = functools.partial(optimizer.update, model, x, t)
    step()  # makes the replicas equal, and begins the trial of overlap='auto'
    while getattr(optimizer, "_trial", None) is not None:
        step()
    return Pipelined(step, optimizer.wait) if settings.get("double_buffering") else step


def forward(network: str, batchsize: int, and_backward: bool) -> Step:
    """Return the computation of a loss, and of its gradients."""
    chainermn.create_communicator("naive")  # for what it does to threads and memory
    made = networks.make(network)
    x, t = made.examples(batchsize)

    def step() -> None:
        loss = F.softmax_cross_entropy(made.model(x), t)
        if and_backward:
            made.model.cleargrads()
            loss.backward()

    return step


PREPARE: dict[str, Callable[..., Step]] = {
    "exchange": exchange,
    "iteration": iteration,
    "forward": forward,
}
