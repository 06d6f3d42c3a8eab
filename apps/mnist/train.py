#!/usr/bin/env python3
"""Train a network to read handwritten digits."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import chainer
import numpy as np
from chainer.training import extensions

import chainermn
import data
from chainermn.agreement import exit_together
from chainermn.extensions import StopOnSignal, multi_node_snapshot, record_run
from chainermn.progress import silence
from model import MODELS, load_weights
from reports import ACCURACY, add_reports, print_summary


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.quiet:
        silence()
    comm = chainermn.create_communicator(args.communicator)
    if comm.rank == 0:
        kind = type(comm).__name__
        print(f"ranks: {comm.size}, hosts: {comm.inter_size}, communicator: {kind}", flush=True)
    with exit_together(comm):
        device = chainermn.choose_device(comm, gpu=args.gpu)
    np.random.seed(args.seed)
    device.xp.random.seed(args.seed)

    network = MODELS[args.model](args.unit, len(data.CLASSES))
    model = chainer.links.Classifier(network)
    model.to_device(device)
    optimizer = chainer.optimizers.Adam()
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)

    with exit_together(comm):
        train, validation = data.load_shown(args) if comm.rank == 0 else (None, None)
    images = comm.bcast_obj(train and data.digest(train))
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    validation = chainermn.scatter_dataset(validation, comm, force_equal_length=False)
    batches = chainer.iterators.SerialIterator(train, args.batchsize)
    validation_batches = chainer.iterators.SerialIterator(
        validation, args.batchsize, repeat=False, shuffle=False
    )

    if args.graphs:
        optimizer.use_cuda_graphs()
    updater = chainer.training.StandardUpdater(batches, optimizer, device=device)
    trainer = chainer.training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(validation_batches, model, device=device)
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm, mean_over="examples")
    trainer.extend(evaluator)
    if args.evaluate:
        with exit_together(comm):
            load_weights(Path(args.out, "best.npz"), network)
        accuracy = evaluator()[ACCURACY]
        if comm.rank == 0:
            print(f"{accuracy:.2%} of the validation data read correctly")
        return
    with exit_together(comm):
        if comm.rank == 0:
            add_reports(trainer, network, args, comm.size)

    snapshot = extensions.snapshot(n_retains=3)
    settings = {key: vars(args)[key] for key in ("dataset", "model", "unit", "batchsize", "seed")}
    settings["images"] = images
    snapshot = multi_node_snapshot(comm, snapshot, [], settings=settings)
    trainer.extend(snapshot)
    trainer.extend(StopOnSignal(comm, snapshot))
    with exit_together(comm):
        snapshot.resume(trainer, args.resume)
        record_run(comm, vars(args), args.out)
    trainer.run()
    if comm.rank == 0:
        print_summary(trainer)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dataset", choices=data.DATASETS, default="digits", help="default: %(default)s")
    add("--data", metavar="DIR", help="read MNIST's IDX files from this folder")
    add("--model", "-m", choices=MODELS, default="mlp", help="default: %(default)s")
    add("--batchsize", "-b", type=int, default=30, help="batch size per process")
    add("--epoch", "-e", type=int, default=20, help="number of epochs")
    add("--unit", "-u", type=int, default=200, help="units in each hidden layer")
    add("--communicator", help="default: chosen for your hosts and GPUs")
    add("--gpu", "-g", action="store_true", help="train on GPU")
    add("--graphs", action="store_true", help="launch each step on the GPU as one CUDA graph")
    add("--seed", type=int, default=0, help="seed of initial weights and shuffling")
    add("--out", "-o", metavar="DIR", default="result", help="folder for log, plots and snapshots")
    add("--resume", "-r", metavar="FILE", help="snapshot to resume from")
    add("--tensorboard", action="store_true", help="also write the log for TensorBoard")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--evaluate", action="store_true", help="do not train; evaluate best.npz in --out")
    add("--quiet", "-q", action="store_true", help="print only warnings and errors")
    args = parser.parse_args(argv)
    if min(args.epoch, args.batchsize, args.unit) < 1 or args.seed < 0:
        parser.error("--epoch, --batchsize and --unit must be at least 1, and --seed at least 0")
    if args.graphs and not args.gpu:
        parser.error("--graphs needs --gpu")
    return args


if __name__ == "__main__":
    main()
