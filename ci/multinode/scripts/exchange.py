"""Exchange numbers with communicators; print what every rank receives, as JSON.

``python exchange.py NAME...`` takes names of communicators. `test_exchange` knows what is right.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn
from chainermn import CommunicatorBase

STEPS = 3
EXAMPLES = 12  # per step, divided among the ranks


def gradients(rank: int, size: int) -> list[np.ndarray]:
    """Return a rank's gradients: whole numbers with whole means, so that nothing is rounded.

    Some arrays have fewer elements than there are ranks, some as many, some more. Float16
    can hold all values.
    """
    random = np.random.default_rng(rank)
    shapes: list[tuple[int, ...]] = [(1,), (2, 2), (3, 5, 7)]
    return [size * random.integers(-50, 50, shape).astype("f8") for shape in shapes]


def network() -> chainer.Link:
    np.random.seed(0)
    with chainer.using_config("dtype", np.float64):
        return chainer.Sequential(L.Linear(3, 8), F.tanh, L.Linear(8, 2))


def examples(step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([step, step])
    return random.normal(size=(EXAMPLES, 3)), random.normal(size=(EXAMPLES, 2))


def loss(model: chainer.Link, x: np.ndarray, t: np.ndarray) -> chainer.Variable:
    return F.mean_squared_error(model(x), t)


def optimizer() -> chainer.Optimizer:
    return chainer.optimizers.MomentumSGD(0.1)


def values(model: chainer.Link) -> list[Any]:
    return [parameter.array.tolist() for _, parameter in sorted(model.namedparams())]


def mean_grad(comm: CommunicatorBase) -> list[Any]:
    model = chainer.ChainList()
    parameters = [chainer.Parameter(np.zeros_like(g)) for g in gradients(comm.rank, comm.size)]
    with model.init_scope():
        for index, parameter in enumerate(parameters):
            setattr(model, f"parameter{index}", parameter)
            parameter.grad = gradients(comm.rank, comm.size)[index]
    comm.multi_node_mean_grad(model)
    return [parameter.grad.tolist() for parameter in parameters]


def collectives(comm: CommunicatorBase) -> dict[str, Any]:
    mine = np.arange(3) + 10 * comm.rank
    return {
        "allreduce": np.array(comm.allreduce(mine)).tolist(),
        "bcast": np.array(comm.bcast(mine, comm.size - 1)).tolist(),
        "allgather": np.array(comm.allgather(mine)).tolist(),
        "alltoall": np.array(comm.alltoall((mine,) * comm.size)).tolist(),
        "bcast_obj": comm.bcast_obj({"from": comm.rank}),
    }


def train(comm: CommunicatorBase, overlap: bool) -> list[Any]:
    model = network()
    for parameter in model.params():
        parameter.array += comm.rank  # rank 0's values count
    together = chainermn.create_multi_node_optimizer(optimizer(), comm, overlap=overlap)
    together.setup(model)
    part = slice(EXAMPLES * comm.rank // comm.size, EXAMPLES * (comm.rank + 1) // comm.size)
    for step in (0, *range(STEPS)):  # the first update only distributes the parameters
        x, t = examples(step)
        together.update(loss, model, x[part], t[part])
    return values(model)


def exchange(name: str) -> dict[str, Any]:
    try:
        comm = chainermn.create_communicator(name)
    except ValueError as error:
        return {"refused": str(error)}
    by_float16 = chainermn.create_communicator(name, allreduce_grad_dtype="float16")
    return {
        "mean_grad": mean_grad(comm),
        "mean_grad_by_float16": mean_grad(by_float16),
        "collectives": collectives(comm),
        "trained": train(comm, overlap=False),
        "trained_overlapping": train(comm, overlap=True),
    }


def main(names: list[str]) -> None:
    comm = chainermn.create_communicator("naive")
    place = (comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size)
    report = {"place": comm.gather_obj((socket.gethostname(), comm.rank, comm.size, *place))}
    for name in names:
        report[name] = comm.gather_obj(exchange(name))
    if comm.rank == 0:
        print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
