"""Training that resumes: ``train.py KIND OUT``, where KIND is `snapshot` or `checkpoint`.

Every element of the parameter is the number of steps taken, which is checked at the start. Most of
the time goes into writing.
"""

import os
import sys

import chainer
import chainer.functions as F
import numpy as np

import chainermn


class Counter(chainer.Link):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.count = chainer.Parameter(np.zeros(1 << 18, np.float32))

    def __call__(self, x: np.ndarray) -> chainer.Variable:
        return -F.sum(self.count)


class Report(chainer.training.Extension):
    """Reports where training resumes. Its low priority makes it run after a snapshot is loaded."""

    priority = -1000

    def __init__(self, comm: chainermn.CommunicatorBase) -> None:
        self.rank = comm.rank

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        iteration = trainer.updater.iteration
        model = trainer.updater.get_optimizer("main").target
        steps = max(iteration - 1, 0)  # the first update takes no step, but makes ranks equal
        assert (model.count.array == steps).all(), (iteration, model.count.array)
        print(f"rank {self.rank}, process {os.getpid()}, goes on after {iteration}.", flush=True)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        pass


def main(kind: str, out: str) -> None:
    comm = chainermn.create_communicator("naive")
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1), comm)
    optimizer.setup(Counter())
    numbers = np.arange(60) if comm.rank == 0 else None
    numbers = chainermn.scatter_dataset(numbers, comm, shuffle=True, seed=0)
    batches = chainer.iterators.SerialIterator(numbers, 4)
    updater = chainer.training.StandardUpdater(batches, optimizer)
    trainer = chainer.training.Trainer(updater, (10**9, "iteration"), out=out)
    if kind == "checkpoint":
        checkpointer = chainermn.create_multi_node_checkpointer(kind, comm, 2, 2, path=out)
        checkpointer.maybe_load(trainer, optimizer)
        trainer.extend(checkpointer, trigger=(1, "iteration"))
    else:
        snapshot = chainer.training.extensions.snapshot(
            filename="snapshot.{.updater.iteration}", n_retains=3, autoload=True
        )
        snapshot = chainermn.extensions.multi_node_snapshot(comm, snapshot, [])
        trainer.extend(snapshot, trigger=(1, "iteration"))
    trainer.extend(Report(comm))
    trainer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
