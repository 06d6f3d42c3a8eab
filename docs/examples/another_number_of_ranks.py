"""Train for two epochs, from a snapshot of any number of ranks if one is given."""

import sys

import chainer
from chainer.training import extensions
from small_training import make_trainer

import chainermn


def main(out: str, snapshot: str | None = None) -> None:
    comm = chainermn.create_communicator("naive")
    trainer = make_trainer(comm, epochs=2, out=out)
    optimizer = trainer.updater.get_optimizer("main")
    if comm.rank == 0:
        trainer.extend(extensions.snapshot(filename="snapshot"), trigger=(1, "epoch"))
    # begin
    if snapshot is not None:
        chainer.serializers.load_npz(snapshot, optimizer.target, path="updater/model:main/")
        chainer.serializers.load_npz(snapshot, optimizer, path="updater/optimizer:main/")
    # end
    trainer.run()
    if comm.rank == 0:
        print(f"step {optimizer.t} of the optimizer")


if __name__ == "__main__":
    main(*sys.argv[1:])
