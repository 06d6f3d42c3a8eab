"""Exchange with all communicators on many ranks; rank 0 prints wrong results as JSON."""

from __future__ import annotations

import json
import socket
from typing import Any

import chainer
import numpy as np

import chainermn
from chainermn import CommunicatorBase

NAMES = ["naive", "flat", "hierarchical", "two_dimensional", "non_cuda_aware", "single_node"]
SHAPES = [(1,), (3, 5), (5000,)]


def gradients(rank: int, size: int) -> list[np.ndarray]:
    """Return a rank's gradients: whole numbers with whole means, so that nothing is rounded."""
    random = np.random.default_rng(rank)
    return [size * random.integers(-50, 50, shape).astype("f8") for shape in SHAPES]


def wrong_mean(comm: CommunicatorBase) -> list[str]:
    parameters = [chainer.Parameter(np.zeros(shape)) for shape in SHAPES]
    model = chainer.Chain()
    with model.init_scope():
        for index, gradient in enumerate(gradients(comm.rank, comm.size)):
            setattr(model, f"parameter{index}", parameters[index])
            parameters[index].grad = gradient
    comm.multi_node_mean_grad(model)
    replicas = [gradients(rank, comm.size) for rank in range(comm.size)]
    expected = [np.mean(grads, axis=0) for grads in zip(*replicas, strict=True)]
    return [
        f"mean of gradients of shape {mean.shape}"
        for parameter, mean in zip(parameters, expected, strict=True)
        if not np.array_equal(parameter.grad, mean)
    ]


def wrong_messages(comm: CommunicatorBase) -> list[str]:
    root = comm.size - 1
    mine = np.arange(3) + comm.rank
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank % 2:
        got = comm.recv_obj(left), comm.recv(left, 0)
    comm.send_obj({"from": comm.rank}, right)
    comm.send(mine, right, 0)
    if comm.rank % 2 == 0:
        got = comm.recv_obj(left), comm.recv(left, 0)
    everything = [np.arange(3) + rank for rank in range(comm.size)]
    fine = {
        "bcast": np.array_equal(comm.bcast(mine, root), everything[root]),
        "bcast_obj": comm.bcast_obj({"from": comm.rank}, root=root) == {"from": root},
        "allgather": np.array_equal(comm.allgather(mine), everything),
        "allreduce": np.array_equal(comm.allreduce(mine), sum(everything)),
        "send_obj and recv_obj": got[0] == {"from": left},
        "send and recv": np.array_equal(got[1], everything[left]),
    }
    return [name for name, is_fine in fine.items() if not is_fine]


def wrong(name: str) -> list[str]:
    try:
        comm = chainermn.create_communicator(name)
    except ValueError as error:
        return [f"refused: {error}"]
    return wrong_mean(comm) + wrong_messages(comm)


def main() -> None:
    comm = chainermn.create_communicator("naive")
    report: dict[str, Any] = {"hosts": comm.gather_obj(socket.gethostname())}
    for name in NAMES:
        report[name] = comm.gather_obj(wrong(name))
    if comm.rank == 0:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
