"""Train, and resume where an earlier run of this script ended.

Arguments: a folder, and the iteration in which to end by force.
"""

import os
import sys

import numpy as np
from small_training import make_trainer

import chainermn


def main(out: str, end_in: int) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, epochs=4, out=out)
    checkpointer = chainermn.create_multi_node_checkpointer("digits", comm)
    trainer.extend(checkpointer, trigger=(5, "iteration"))  # on every rank
    checkpointer.maybe_load(trainer)
    if comm.rank == 0:
        print(f"resuming after iteration {trainer.updater.iteration}", flush=True)
    trainer.extend(lambda trainer: os._exit(1), name="crash", trigger=(end_in, "iteration"))
    trainer.run()
    if comm.rank == 0:
        weights = trainer.updater.get_optimizer("main").target.predictor.W.array
        np.save(f"{out}/weights.npy", weights)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
