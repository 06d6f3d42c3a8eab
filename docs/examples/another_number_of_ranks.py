"""Train until an epoch. If there is a snapshot, of any number of ranks, resume from it."""

import sys

from chainer.training import extensions
from small_training import make_trainer

import chainermn


def main(out: str, epochs: int) -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, epochs=epochs, out=out)
    snapshot = extensions.snapshot(filename="snapshot", autoload=True)
    snapshot = chainermn.extensions.multi_node_snapshot(comm, snapshot, [])  # one for all ranks
    trainer.extend(snapshot, trigger=(1, "epoch"))  # on every rank
    trainer.run()
    if comm.rank == 0:
        step = trainer.updater.get_optimizer("main").t
        print(f"epoch {trainer.updater.epoch}, step {step} of the optimizer")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
