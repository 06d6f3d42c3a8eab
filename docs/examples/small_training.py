"""A training that is over in a moment, for the examples of these pages."""

from __future__ import annotations

import chainer
import numpy as np
from chainer import training

import chainermn


def make_trainer(comm: chainermn.CommunicatorBase, epochs: int, out: str) -> training.Trainer:
    """Return a trainer that learns whether the sum of ten numbers is positive."""
    np.random.seed(0)
    model = chainer.links.Classifier(chainer.links.Linear(10, 2))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)
    inputs = np.random.RandomState(1).randn(120, 10).astype(np.float32)
    examples = chainer.datasets.TupleDataset(inputs, (inputs.sum(axis=1) > 0).astype(np.int32))
    sampler = chainermn.create_distributed_sampler(examples, comm, seed=0)
    batches = chainer.iterators.SerialIterator(examples, 6, order_sampler=sampler)
    updater = training.StandardUpdater(batches, optimizer)
    return training.Trainer(updater, (epochs, "epoch"), out=out)
