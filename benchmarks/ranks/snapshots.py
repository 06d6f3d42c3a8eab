"""Training with a snapshot after every ``ITERATIONS``."""

from __future__ import annotations

import functools
from typing import Any

import chainer
from chainer.serializers import save_npz
from chainer.training import extensions

import chainermn
from benchmarks.networks import ITERATIONS, SNAPSHOT_UNITS
from benchmarks.ranks import networks
from benchmarks.ranks.orders import Orders, Pipelined


def run(orders: Orders) -> None:
    orders.obey(training)


def training(writer: str | None, compression: bool) -> Pipelined:
    """Return iterations and a snapshot, which may still be written in the next step."""
    comm = chainermn.create_communicator()
    network = networks.Network(networks.mlp(SNAPSHOT_UNITS), (SNAPSHOT_UNITS[0],))
    model = chainer.links.Classifier(network.model)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(1e-4), comm)
    data = chainer.datasets.TupleDataset(*network.examples(100))
    batches = chainer.iterators.SerialIterator(data, 100)
    updater = chainer.training.StandardUpdater(batches, optimizer.setup(model))
    trainer = chainer.training.Trainer(updater, out=".")  # the folder of this job
    snapshot: Any = chainer.training.Extension()
    if writer is not None:
        save = functools.partial(save_npz, compression=compression)
        write = getattr(extensions.snapshot_writers, writer)(save)
        snapshot = extensions.snapshot_object(updater, "snapshot", writer=write)
        snapshot = chainermn.extensions.multi_node_snapshot(comm, snapshot, [])

    def step() -> None:
        for _ in range(ITERATIONS):
            updater.update()
        if writer is not None:
            snapshot(trainer)

    return Pipelined(step, snapshot.finalize)
