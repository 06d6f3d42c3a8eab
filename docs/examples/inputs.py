"""Feed a model on three ranks: rank 0 needs inputs, rank 1 nothing, rank 2 labels.

``mpiexec -n 3 python inputs.py synchronized``, or ``shared`` or ``unsynchronized``.
"""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.iterators import SerialIterator
from chainer.training import StandardUpdater

import chainermn


def unsynchronized(comm, x, t) -> SerialIterator:
    """Each rank reads what it needs, in an order of its own."""
    nothing = chainermn.create_empty_dataset(range(len(x)))
    dataset = {0: x, 1: nothing, 2: t}[comm.rank]
    iterator = SerialIterator(dataset, batch_size=50)
    return iterator


def synchronized(comm, x, t):
    """Each rank reads what it needs, all in the same order."""
    iterator = unsynchronized(comm, x, t)
    iterator = chainermn.create_synchronized_iterator(iterator, comm)
    return iterator


def shared(comm, x, t):
    """Rank 0 reads inputs and labels, and gives them to all."""
    iterator = None
    if comm.rank == 0:
        iterator = SerialIterator(chainer.datasets.TupleDataset(x, t), batch_size=50)
    iterator = chainermn.create_multi_node_iterator(iterator, comm)
    return iterator


def build(comm) -> chainermn.MultiNodeChainList:
    model = chainermn.MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(chainer.Sequential(L.Linear(2, 16), F.relu), rank_in=None, rank_out=1)
    elif comm.rank == 1:
        model.add_link(chainer.Sequential(L.Linear(16, 16), F.relu), rank_in=0, rank_out=2)
    else:
        model.add_link(L.Linear(16, 2), rank_in=1, rank_out=None)
    return model


def main() -> None:
    comm = chainermn.create_communicator()
    if comm.size != 3:
        raise ValueError(f"expected 3 ranks, got {comm.size}")
    kinds = {f.__name__: f for f in (synchronized, shared, unsynchronized)}
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=kinds)
    create_iterator = kinds[parser.parse_args().kind]
    np.random.seed(comm.rank)
    generator = np.random.RandomState(0)
    x = generator.randn(200, 2).astype(np.float32)
    t = (x[:, 0] * x[:, 1] > 0).astype(np.int32)  # same sign
    model = build(comm)
    iterator = create_iterator(comm, x, t)

    def loss(*batch):
        if comm.rank == 0:
            return model(batch[0])
        return model() if comm.rank == 1 else F.softmax_cross_entropy(model(), batch[-1])

    optimizer = chainer.optimizers.Adam(0.05).setup(model)
    updater = StandardUpdater(iterator, optimizer, loss_func=loss)
    while updater.epoch < 10:
        updater.update()

    with chainer.no_backprop_mode():
        y = model(x) if comm.rank == 0 else model()
    if comm.rank == 2:
        accuracy = F.accuracy(y, t).item()
        print(f"epoch {updater.epoch}: {accuracy:.0%} are right")


if __name__ == "__main__":
    main()
