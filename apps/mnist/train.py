#!/usr/bin/env python3
"""Train a perceptron to read handwritten digits."""

import argparse
from pathlib import Path

import chainer
import matplotlib
import numpy as np
from chainer.training import extensions

import chainermn
import data
import terminal
from model import MLP


def main() -> None:
    args = parse_arguments()
    comm = chainermn.create_communicator(args.communicator)
    if comm.rank == 0:
        kind = type(comm).__name__
        print(f"ranks: {comm.size}, hosts: {comm.inter_size}, communicator: {kind}", flush=True)
    device = chainer.get_device(f"@cupy:{comm.intra_rank}" if args.gpu else "@numpy")
    device.use()
    np.random.seed(args.seed)
    device.xp.random.seed(args.seed)

    model = chainer.links.Classifier(MLP(args.unit, 10))
    model.to_device(device)
    optimizer = chainer.optimizers.Adam()
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)

    train, validation = data.load(args.dataset, args.data) if comm.rank == 0 else (None, None)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    validation = chainermn.scatter_dataset(validation, comm)
    batches = chainer.iterators.SerialIterator(train, args.batchsize)
    validation_batches = chainer.iterators.SerialIterator(
        validation, args.batchsize, repeat=False, shuffle=False
    )

    updater = chainer.training.StandardUpdater(batches, optimizer, device=device)
    trainer = chainer.training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(validation_batches, model, device=device)
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
    trainer.extend(evaluator)
    if comm.rank == 0:
        add_reports(trainer)

    if args.resume:
        chainer.serializers.load_npz(args.resume, trainer)
    trainer.run()
    if comm.rank == 0:
        print_summary(trainer)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dataset", choices=["digits", "mnist"], default="digits", help="default: %(default)s")
    add("--data", metavar="DIR", help="folder with MNIST's IDX files, instead of a download")
    add("--batchsize", "-b", type=int, default=30, help="examples of a process in one step")
    add("--epoch", "-e", type=int, default=20, help="how often to go through the data")
    add("--unit", "-u", type=int, default=200, help="units of each hidden layer")
    add("--communicator", help="default: chosen for the hosts and GPUs at hand")
    add("--gpu", "-g", action="store_true", help="train on GPU")
    add("--seed", type=int, default=0, help="of the first weights and of all shuffling")
    add("--out", "-o", metavar="DIR", default="result", help="for log, plots and snapshots")
    add("--resume", "-r", metavar="FILE", help="snapshot to go on from")
    return parser.parse_args()


def add_reports(trainer: chainer.training.Trainer) -> None:
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.snapshot(filename="snapshot_epoch_{.updater.epoch}", n_retains=3))

    matplotlib.use("Agg")  # draws into files, whether there is a screen or not
    for quantity in ("loss", "accuracy"):
        curves = [f"main/{quantity}", f"validation/main/{quantity}"]
        plot = extensions.PlotReport(curves, "epoch", filename=f"{quantity}.png")
        trainer.extend(plot)

    columns = ["epoch", "main/loss", "validation/main/loss"]
    columns += ["main/accuracy", "validation/main/accuracy", "elapsed_time"]
    if terminal.is_watched():
        trainer.extend(extensions.PrintReport(columns))
        trainer.extend(extensions.ProgressBar(update_interval=10))
    else:
        trainer.extend(extensions.PrintReport(columns, out=terminal.PlainOutput()))


def print_summary(trainer: chainer.training.Trainer) -> None:
    last = trainer.get_extension("LogReport").log[-1]
    accuracy, epoch = last["validation/main/accuracy"], last["epoch"]
    plural = "epoch" if epoch == 1 else "epochs"
    print(f"{accuracy:.2%} of the validation data read correctly after {epoch} {plural}")
    print(f"curves and log: {Path(trainer.out).resolve()}/{{accuracy.png,loss.png,log}}")


if __name__ == "__main__":
    main()
