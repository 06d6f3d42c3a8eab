"""Train for some iterations, resuming if there is a checkpoint; ranks signal themselves.

``stop_and_resume.py KIND FOLDERS [RANK:ITERATION:SIGNAL ...]`` trains in each folder, and prints
where that began.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
from chainer.training import extensions

import chainermn
import training
from chainermn.communicators import CommunicatorBase
from chainermn.extensions import StopOnSignal, create_multi_node_checkpointer, multi_node_snapshot

ITERATIONS = 12


def train(comm: CommunicatorBase, kind: str, folder: str | Path, *signals: str) -> int:
    """Train, save the state of each rank at the end, and return how many iterations were resumed.

    A signal to rank -1 goes to the last one.
    """
    trainer = training.make_trainer(comm, folder, ITERATIONS)
    if kind == "checkpointer":
        checkpoint = create_multi_node_checkpointer("job", comm)
    else:
        sets = [[rank] for rank in range(comm.size)]
        checkpoint = multi_node_snapshot(comm, extensions.snapshot(autoload=True), sets)
    trainer.extend(checkpoint, trigger=(1000, "iteration"))
    trainer.extend(StopOnSignal(comm, checkpoint))
    if kind == "checkpointer":
        checkpoint.maybe_load(trainer)
    else:
        checkpoint.initialize(trainer)
    resumed = trainer.updater.iteration
    update = trainer.updater.update_core

    def update_and_signal() -> None:
        update()
        for text in signals:
            rank, iteration, name = text.split(":")
            is_due = trainer.updater.iteration + 1 == int(iteration)
            if is_due and rank in (str(comm.rank), str(comm.rank - comm.size), "all"):
                os.kill(os.getpid(), signal.Signals[name])

    trainer.updater.update_core = update_and_signal
    trainer.run()
    assert trainer.updater.iteration == ITERATIONS
    np.savez(Path(folder, f"state.{comm.rank}.npz"), **training.state_of(trainer))
    return int(resumed)


if __name__ == "__main__":
    comm = chainermn.create_communicator("naive")
    for folder in sys.argv[2].split(","):
        resumed = train(comm, sys.argv[1], folder, *sys.argv[3:])
        if comm.rank == 0:
            print(resumed)
