"""Timelines and reports that a script asks for itself."""

from __future__ import annotations

import sys

import chainer
import numpy as np
from chainer.training.extensions import LogReport
from small_training import make_trainer

import chainermn
from chainermn.extensions import DistributedReport, Timeline
from chainermn.spans import span


def main(out: str) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, 2, out)
    trainer.extend(Timeline(comm, iterations=(10, 12)))
    trainer.extend(DistributedReport(comm))  # on every rank
    if comm.rank == 0:
        trainer.extend(LogReport())
    trainer.run()

    model, n_batches = chainer.links.Linear(3, 1), 5
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model)

    def loss(x: np.ndarray) -> chainer.Variable:
        return chainer.functions.sum(model(x))

    with chainermn.record_timeline(comm, f"{out}/loop.json"):
        for number in range(1, n_batches + 1):
            with span("iteration", details={"iteration": number}):
                with span("data"):
                    batch = np.ones((2, 3), np.float32)
                optimizer.update(loss, batch)


if __name__ == "__main__":
    main(sys.argv[1])
