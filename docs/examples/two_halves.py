"""Train a model in two halves: one layer on rank 0, the other layer and the loss on rank 1."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn


def train(comm, layer, x, t, steps=5) -> list[float]:
    """Train the layer of this rank; return the losses on rank 1."""
    losses = []
    optimizer = chainer.optimizers.SGD(lr=0.5).setup(layer)
    for _ in range(steps):
        layer.cleargrads()
        if comm.rank == 0:
            h = F.tanh(layer(x))
            delegate = chainermn.functions.send(h, comm, rank=1)
            delegate.backward()
        else:
            h = chainermn.functions.recv(comm, rank=0)
            loss = F.softmax_cross_entropy(layer(h), t)
            loss.backward()
            losses.append(loss.item())
        optimizer.update()
    return losses


def main() -> None:
    comm = chainermn.create_communicator()
    if comm.size != 2:
        raise ValueError(f"expected 2 ranks, got {comm.size}")
    np.random.seed(0)
    layer = L.Linear(4, 3) if comm.rank == 0 else L.Linear(3, 2)
    x = np.random.RandomState(1).randn(6, 4).astype(np.float32)  # rank 1 does not use it
    t = np.array([0, 1, 0, 0, 1, 1], np.int32)  # nor rank 0 this
    losses = train(comm, layer, x, t)
    if comm.rank == 1:
        print("loss:", *(f"{loss:.3f}" for loss in losses))


if __name__ == "__main__":
    main()
