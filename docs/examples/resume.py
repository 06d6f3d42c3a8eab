"""Train, and resume from the newest snapshot, whatever ended the last run.

``--kill-in 12`` kills rank 1 in iteration 12, and ``--stop-in 12`` sends it SIGUSR1; neither does
so in a run that has resumed.
"""

import argparse
import os
import signal

import numpy as np
from chainer.training import extensions
from small_training import make_trainer

import chainermn
from chainermn.extensions import StopOnSignal, multi_node_snapshot


def main(args: argparse.Namespace) -> None:
    comm = chainermn.create_communicator()
    snapshot = extensions.snapshot(n_retains=3)
    # One file for all ranks. The settings are what changes the result.
    snapshot = multi_node_snapshot(comm, snapshot, [], settings={"batch size": 6})
    stop = StopOnSignal(comm, snapshot)  # before iterators that start processes

    trainer = make_trainer(comm, epochs=4, out=args.out)
    trainer.extend(snapshot, trigger=(10, "iteration"))  # on every rank
    trainer.extend(stop)
    snapshot.resume(trainer)
    if trainer.updater.iteration == 0:
        add_accident(trainer, comm, args)
    trainer.run()
    if comm.rank == 0:
        print(f"finished after iteration {trainer.updater.iteration}")
        model = trainer.updater.get_optimizer("main").target
        np.save(f"{args.out}/weights.npy", model.predictor.W.array)


def add_accident(trainer, comm, args: argparse.Namespace) -> None:
    """Send rank 1 a signal in the middle of training."""

    def kill(trainer):
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(trainer):
        os.kill(os.getpid(), signal.SIGUSR1)

    for send, iteration in ((kill, args.kill_in), (stop, args.stop_in)):
        if comm.rank == 1 and iteration:
            trainer.extend(send, name="accident", trigger=(iteration, "iteration"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--kill-in", type=int)
    parser.add_argument("--stop-in", type=int)
    main(parser.parse_args())
