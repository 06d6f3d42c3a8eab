"""Train until a file says to stop, on however many ranks: ``train_elastic.py FOLDER``.

Each element of the parameter is the number of steps taken. Each event is added to the file
``progress``, as a line of JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np

import chainermn

CHECKPOINT = 5  # iterations


class Counter(chainer.Link):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.count = chainer.Parameter(np.zeros(100, np.float32))

    def __call__(self, x: np.ndarray) -> chainer.Variable:
        return -F.sum(self.count)


def main(folder: Path) -> None:
    comm = chainermn.create_communicator("naive")

    def note(event: str) -> None:
        place = trainer.updater.iteration, trainer.updater.epoch_detail
        if comm.rank == 0:
            with (folder / "progress").open("a") as file:
                file.write(json.dumps([event, *place, hosts]) + "\n")

    def has_to_stop(trainer: chainer.training.Trainer) -> bool:
        return bool(comm.bcast_obj((folder / "stop").exists()))

    def pace(trainer: chainer.training.Trainer) -> None:
        time.sleep(0.02)

    hosts = comm.allgather_obj(socket.gethostname())
    model = Counter()
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1), comm)
    optimizer.setup(model)
    numbers = list(range(240)) if comm.rank == 0 else None
    numbers = chainermn.scatter_dataset(numbers, comm, shuffle=True, seed=0)
    batches = chainer.iterators.SerialIterator(numbers, 4)
    updater = chainer.training.StandardUpdater(batches, optimizer)
    trainer = chainer.training.Trainer(updater, has_to_stop, out=str(folder))
    checkpointer = chainermn.create_multi_node_checkpointer("job", comm, path=folder)
    checkpointer.maybe_load(trainer)
    steps = max(updater.iteration - 1, 0)  # the first update only makes the ranks equal
    assert (model.count.array == steps).all(), (updater.iteration, model.count.array)
    note("resumed")
    trainer.extend(checkpointer, trigger=(CHECKPOINT, "iteration"))

    def checkpointed(trainer: chainer.training.Trainer) -> None:
        note("checkpoint")

    later = {"priority": checkpointer.priority - 1}
    trainer.extend(checkpointed, trigger=(CHECKPOINT, "iteration"), **later)
    trainer.extend(lambda trainer: note("step"), name="step", trigger=(1, "iteration"))
    trainer.extend(pace, trigger=(1, "iteration"))
    trainer.run()
    note("stopped")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
