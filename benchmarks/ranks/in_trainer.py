"""Whole iterations of an updater with its batches, recorded if ``CHAINERMN_TIMELINE`` is set."""

from __future__ import annotations

import chainer

import chainermn
from benchmarks.ranks import networks
from benchmarks.ranks.orders import Orders, Step
from chainermn.profiling.timeline.gathering import SharedGathering
from chainermn.profiling.trainers import instrument


def run(orders: Orders) -> None:
    orders.obey(iteration)


def iteration(what: str, network: str, batchsize: int, report: bool) -> Step:
    """Return one iteration of a trainer, optionally with the work of `DistributedReport`."""
    comm = chainermn.create_communicator()
    made = networks.make(network)
    model = chainer.links.Classifier(made.model)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1e-4), comm)
    optimizer.setup(model)
    data = chainer.datasets.TupleDataset(*made.examples(batchsize))
    batches = chainer.iterators.SerialIterator(data, batchsize)
    updater = chainer.training.StandardUpdater(batches, optimizer)
    instrument(chainer.training.Trainer(updater))
    if report:
        SharedGathering(comm.mpi_comm)
    return updater.update
