"""Train until stopped or, from a checkpoint, for three more iterations.

``train.py [FOLDER [ITERATIONS]]``. With ITERATIONS, train for that many from the beginning.
"""

from __future__ import annotations

import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.training import StandardUpdater, Trainer

import chainermn
from chainermn.extensions import StopOnSignal, create_multi_node_checkpointer


def main(folder: str = "out", iterations: str = "1000000000") -> None:
    comm = chainermn.create_communicator("naive")
    checkpointer = create_multi_node_checkpointer("job", comm, path=folder)
    stop = StopOnSignal(comm, checkpointer)
    model = L.Classifier(L.Linear(2, 1), lossfun=F.mean_squared_error)
    model.compute_accuracy = False
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model)
    x = np.ones((4, 2), np.float32)
    data = chainer.datasets.TupleDataset(x, x[:, :1])
    updater = StandardUpdater(chainer.iterators.SerialIterator(data, 2), optimizer)
    trainer = Trainer(updater, (int(iterations), "iteration"), out=folder)
    trainer.extend(checkpointer, trigger=(1000, "iteration"))
    trainer.extend(stop)
    checkpointer.maybe_load(trainer)
    first = updater.iteration
    if first:
        trainer.stop_trigger = lambda trainer: trainer.updater.iteration == first + 3
    if comm.rank == 0:
        print(f"{comm.size} ranks begin after iteration {first}", flush=True)
        trainer.extend(say_that_it_trains, trigger=(1, "iteration"))
    trainer.run()
    if comm.rank == 0:
        print(f"finished: {updater.iteration - first} iterations from {first}", flush=True)


def say_that_it_trains(trainer: Trainer) -> None:
    if trainer.updater.iteration == 1:
        print("one iteration", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
