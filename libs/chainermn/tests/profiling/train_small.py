"""Train six iterations with all that a timeline shows: overlap, evaluation, a checkpoint."""

import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.training import StandardUpdater, Trainer, extensions

import chainermn


def main(out: str) -> None:
    comm = chainermn.create_communicator("flat")
    np.random.seed(0)
    # Two layers of 2 MiB make two buckets, which are exchanged side by side.
    network = chainer.Sequential(
        L.Linear(3, 512),
        F.relu,
        L.Linear(512, 1024),
        F.relu,
        L.Linear(1024, 512),
        L.Linear(512, 2),
    )
    model = L.Classifier(network)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.01), comm, overlap=True
    ).setup(model)
    x = np.random.rand(12, 3).astype(np.float32)
    data = chainer.datasets.TupleDataset(x, (x[:, 0] > 0.5).astype(np.int32))
    batches = chainer.iterators.SerialIterator(data, 4)
    trainer = Trainer(StandardUpdater(batches, optimizer), (6, "iteration"), out)
    once = chainer.iterators.SerialIterator(data, 4, repeat=False, shuffle=False)
    evaluator = chainermn.create_multi_node_evaluator(extensions.Evaluator(once, model), comm)
    trainer.extend(evaluator, trigger=(3, "iteration"))
    checkpointer = chainermn.create_multi_node_checkpointer("small", comm, path=out)
    trainer.extend(checkpointer, trigger=(4, "iteration"))
    trainer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
