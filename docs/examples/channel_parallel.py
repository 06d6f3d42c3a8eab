"""A convolutional network whose channels are divided among the ranks.

mpiexec -n 2 python channel_parallel.py [FOLDER]

With FOLDER, each rank saves its parameters there, from before and after training.
"""

from __future__ import annotations

import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn

CHANNELS, CLASSES, SIZE = 11, 4, 9


class Net(chainer.Chain):
    """Each rank has some channels of two layers, and the whole of the small first one."""

    def __init__(self, comm: chainermn.CommunicatorBase) -> None:
        super().__init__()
        self.comm = comm
        mine = CHANNELS * (comm.rank + 1) // comm.size - CHANNELS * comm.rank // comm.size
        with self.init_scope():
            self.first = L.Convolution2D(1, 4, 3, pad=1)
            self.second = L.Convolution2D(4, mine, 3, pad=1)
            self.third = L.Convolution2D(CHANNELS, mine, 3, pad=1)
            self.last = L.Linear(mine * SIZE**2, CLASSES, nobias=comm.rank > 0)

    def forward(self, x: np.ndarray) -> chainer.Variable:
        h = F.relu(self.first(x))
        h = F.relu(self.second(h))  # some of the output channels
        h = F.concat(chainermn.functions.allgather(self.comm, h), axis=1)  # all of them
        h = F.relu(self.third(h))  # again some of the output channels, and with these
        h = self.last(h)  # as inputs, some terms of each sum
        return chainermn.functions.allreduce(self.comm, h)


def update(net: Net, optimizer: chainer.Optimizer, x: np.ndarray, t: np.ndarray) -> float:
    net.cleargrads()
    loss = F.softmax_cross_entropy(net(x), t)  # the same on every rank
    (loss / net.comm.size).backward()
    for parameter in net.first.params():  # of which every rank has a copy
        parameter.grad = net.comm.allreduce(parameter.grad)
    optimizer.update()
    return loss.item()


def make_batch() -> tuple[np.ndarray, np.ndarray]:
    """Return images of bars, and which of four directions they have; the same on every rank."""
    random = np.random.RandomState(0)
    t = np.arange(32, dtype=np.int32) % CLASSES
    bar = np.zeros((SIZE, SIZE))
    bar[SIZE // 2] = 1
    bars = np.stack([bar, bar.T, np.eye(SIZE), np.eye(SIZE)[::-1]])
    x = bars[t] + random.normal(0, 1, (len(t), SIZE, SIZE))
    return x[:, None].astype(chainer.get_dtype()), t


def main() -> None:
    comm = chainermn.create_communicator()
    folders = sys.argv[1:]
    np.random.seed(comm.rank)  # not the same channels on every rank
    net = Net(comm)
    comm.bcast_data(net.first)
    for folder in folders:
        chainer.serializers.save_npz(f"{folder}/before{comm.rank}.npz", net)
    optimizer = chainer.optimizers.MomentumSGD(lr=0.02).setup(net)
    x, t = make_batch()
    losses = [update(net, optimizer, x, t) for _ in range(10)]
    print(f"rank {comm.rank}: {net.count_params()} parameters")
    if comm.rank == 0:
        print(f"loss {losses[0]:.2f}, after 10 steps {losses[-1]:.2f}")
    for folder in folders:
        chainer.serializers.save_npz(f"{folder}/after{comm.rank}.npz", net)


if __name__ == "__main__":
    main()
