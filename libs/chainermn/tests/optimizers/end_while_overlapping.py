"""Fail in ``backward`` on one rank only, or reach the ``end`` without the last update."""

import sys
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class Failing(chainer.FunctionNode):
    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        raise RuntimeError("by design")


def main(where: str) -> None:
    import chainermn

    comm = chainermn.create_communicator("naive")
    net = chainer.Sequential(L.Linear(3, 500), L.Linear(500, 500), L.Linear(500, 1))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, overlap=True
    ).setup(net)
    x = np.ones((2, 3), np.float32)
    for _ in range(3):
        optimizer.update(lambda: F.sum(net(x)))
    h = net[0](x)
    if where == "backward" and comm.rank == 1:
        (h,) = Failing().apply((h,))
    net.cleargrads()
    optimizer.backward(F.sum(net[2](net[1](h))))
    if where == "backward":
        optimizer.update()


if __name__ == "__main__":
    main(*sys.argv[1:])
