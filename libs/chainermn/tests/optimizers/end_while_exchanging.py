"""Train with double buffering, then end during an exchange or, with ``raise``, fail."""

import sys

import chainer
import numpy as np


def main(*arguments: str) -> None:
    import chainermn

    comm = chainermn.create_communicator("naive")
    model = chainer.Link()
    with model.init_scope():
        model.x = chainer.Parameter(np.zeros(1_000_000))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1), comm, True)
    optimizer.setup(model)
    for _ in range(4):
        model.x.grad = np.full(1_000_000, comm.rank + 1.0)
        optimizer.update()
    if arguments and comm.rank == 1:
        raise RuntimeError("by design")
    if arguments:
        comm.allgather_obj(None)
    assert (model.x.array == -2 * (comm.size + 1) / 2).all()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
