"""Train for some iterations, resuming if there is a checkpoint; ranks signal themselves.

``stop_and_resume.py FOLDER ITERATIONS KIND [RANK:ITERATION:SIGNAL ...]``. Rank 0
prints the number of iterations done, and each rank saves its state at the end.
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
from chainermn.extensions import StopOnSignal, create_multi_node_checkpointer, multi_node_snapshot


def main(folder: str, iterations: str, kind: str, *signals: str) -> None:
    comm = chainermn.create_communicator("naive")
    trainer = training.make_trainer(comm, folder, int(iterations))
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
    update = trainer.updater.update_core

    def update_and_signal() -> None:
        update()
        for text in signals:
            rank, iteration, name = text.split(":")
            is_due = trainer.updater.iteration + 1 == int(iteration)
            if is_due and rank in (str(comm.rank), "all"):
                os.kill(os.getpid(), signal.Signals[name])

    trainer.updater.update_core = update_and_signal
    try:
        trainer.run()
    finally:
        if comm.rank == 0:
            print(trainer.updater.iteration, flush=True)
    np.savez(Path(folder, f"state.{comm.rank}.npz"), **training.state_of(trainer))


if __name__ == "__main__":
    main(*sys.argv[1:])
