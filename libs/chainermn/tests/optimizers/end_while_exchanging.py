"""End in the middle of exchanges, with double buffering and overlap or, with ``raise``, fail."""

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


def main(*arguments: str) -> None:
    import chainermn

    comm = chainermn.create_communicator("naive")
    net = chainer.Sequential(L.Linear(3, 500), L.Linear(500, 500), L.Linear(500, 1))
    overlapping = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, overlap=True
    ).setup(net)
    x = np.ones((2, 3), np.float32)
    for _ in range(3):
        overlapping.update(lambda: F.sum(net(x)))
    model = chainer.Link()
    with model.init_scope():
        model.x = chainer.Parameter(np.zeros(1_000_000))
    buffering = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1), comm, True)
    buffering.setup(model)
    for _ in range(4):
        model.x.grad = np.full(1_000_000, comm.rank + 1.0)
        buffering.update()
    h = net[0](x)
    if arguments and comm.rank == 1:
        (h,) = Failing().apply((h,))
    net.cleargrads()
    overlapping.backward(F.sum(net[2](net[1](h))))
    if arguments:
        overlapping.update()
    assert (model.x.array == -2 * (comm.size + 1) / 2).all()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
