"""Train two replicas of a model, each on two ranks: model and data parallel at once."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn


def train(replica, peers, layer, x, t, updates=6) -> list[float]:
    """Train this rank's half on its replica's part of the batch; return the losses there."""
    losses = []
    part = slice(*chainermn.scatter_index(len(x), peers))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.5), peers)
    optimizer.setup(layer)
    for _ in range(updates):
        layer.cleargrads()
        if replica.rank == 0:
            h = F.tanh(layer(x[part]))
            chainermn.functions.send(h, replica, rank=1).backward()
        else:
            h = chainermn.functions.recv(replica, rank=0)
            loss = F.softmax_cross_entropy(layer(h), t[part])
            loss.backward()
            losses.append(loss.item())
        optimizer.update()
    return losses


def main() -> None:
    comm = chainermn.create_communicator()
    if comm.size % 2:
        raise ValueError(f"expected an even number of ranks, got {comm.size}")
    replica = comm.split(comm.rank // 2, comm.rank)  # 0 and 1, 2 and 3: one replica
    peers = comm.split(comm.rank % 2, comm.rank)  # 0 and 2, 1 and 3: the same half
    np.random.seed(0)
    layer = L.Linear(4, 3) if replica.rank == 0 else L.Linear(3, 2)
    x = np.random.RandomState(1).randn(6, 4).astype(np.float32)
    t = np.array([0, 1, 0, 0, 1, 1], np.int32)
    losses = train(replica, peers, layer, x, t)
    half = f"rank {comm.rank}: half {replica.rank} of replica {peers.rank}"
    print(half, *(f"{loss:.3f}" for loss in losses))


if __name__ == "__main__":
    main()
