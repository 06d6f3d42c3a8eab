#!/usr/bin/env python3
"""Train a generator to draw images like those of a data set."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import chainer
import numpy as np
from chainer.training import extensions

import chainermn
import data
from chainermn.agreement import exit_together, run_on_root
from chainermn.extensions import (
    DistributedReport,
    StepSeed,
    StopOnSignal,
    multi_node_snapshot,
    record_run,
)
from chainermn.links import create_mnbn_model
from chainermn.progress import silence
from evaluation import DistanceEvaluator, create_reference
from model import Discriminator, Generator, load_generator
from reports import add_reports, finish, show_examples
from updater import GANUpdater


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
    if args.mixed16:
        chainer.global_config.dtype = chainer.mixed16
    if args.channels_last:
        chainer.global_config.compute_mode = "cudnn_fast"
    np.random.seed(args.seed)
    device.xp.random.seed(args.seed)

    with exit_together(comm):
        train, validation = run_on_root(
            comm, 0, "data", lambda: data.load(args.dataset, args.data, args.size)
        )
        if args.evaluate:
            generator = load_generator(Path(args.out, "best.npz"), train.shape[1:3])
    with exit_together(comm):
        reference = run_on_root(
            comm, 0, "evaluation", lambda: create_reference(train, validation, Path(args.out))
        )
    if comm.rank == 0:
        shown = ", ".join(f"{value:.3f} of {name}" for name, value in reference.distances.items())
        print(f"distance from {len(validation)} validation images: {shown}", flush=True)
    if args.evaluate:
        generator.to_device(device)
        distance = DistanceEvaluator(comm, generator, reference, device)(None)
        if comm.rank == 0:
            print(f"distance {distance:.3f} of images by best.npz")
        return

    trainer = create_trainer(args, comm, device, train)
    generator = trainer.updater.get_optimizer("generator").target
    trainer.extend(DistanceEvaluator(comm, generator, reference, device))
    trainer.extend(DistributedReport(comm))
    with exit_together(comm):
        if comm.rank == 0:
            show_examples(train, len(validation), args.out)
            add_reports(trainer, generator, args, comm.size)

    settings = {key: vars(args)[key] for key in ("unit", "batchsize", "lr", "mixed16", "seed")}
    settings["images"] = data.digest(train)
    snapshot = multi_node_snapshot(comm, extensions.snapshot(n_retains=3), [], settings=settings)
    trainer.extend(snapshot)
    trainer.extend(StopOnSignal(comm, snapshot))
    with exit_together(comm):
        snapshot.resume(trainer, args.resume)
        record_run(comm, vars(args), args.out)
    trainer.run()
    if comm.rank == 0:
        finish(trainer, reference.distances)


def create_trainer(
    args: argparse.Namespace,
    comm: chainermn.CommunicatorBase,
    device: chainer.backend.Device,
    images: np.ndarray,
) -> chainer.training.Trainer:
    """Return a trainer of two networks; each rank has a replica of both."""
    optimizers = {}
    for name, kind in (("generator", Generator), ("discriminator", Discriminator)):
        network = kind(*images.shape[1:3], args.unit)
        # Normalizing over the batches of all ranks makes ranks take the steps that one process
        # takes with all their images, and gives them the same running statistics.
        network = create_mnbn_model(network, comm)
        network.to_device(device)
        optimizer = chainer.optimizers.Adam(alpha=args.lr, beta1=0.5)
        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
        optimizers[name] = optimizer.setup(network)
        if args.mixed16:
            optimizer.use_fp32_update()
            optimizer.loss_scaling()

    order = chainermn.create_distributed_sampler(images, comm, seed=args.seed)
    batches = chainer.iterators.SerialIterator(images, args.batchsize, order_sampler=order)
    updater = GANUpdater(batches, optimizers, converter=data.to_pixels, device=device)
    trainer = chainer.training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(StepSeed(args.seed, comm))  # each rank draws its own latents
    return trainer


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dataset", choices=["digits", "mnist", "images"], default="digits")
    add("--data", metavar="DIR", help="folder with MNIST's IDX files, or with image files")
    size = "pixels per side of image files; default: %(default)s"
    add("--size", type=int, default=32, help=size)
    add("--batchsize", "-b", type=int, default=32, help="batch size per process")
    add("--epoch", "-e", type=int, default=100, help="number of epochs")
    add("--unit", "-u", type=int, default=32, help="channels at full image size")
    lr = "learning rate of both networks; default: %(default)s"
    add("--lr", type=float, default=0.0002, help=lr)
    add("--communicator", help="default: chosen for your hosts and GPUs")
    add("--gpu", "-g", action="store_true", help="train on GPU")
    add("--mixed16", action="store_true", help="compute in float16, with float32 parameters")
    last = "store images channels last, as tensor cores need them"
    add("--channels-last", action="store_true", help=last)
    add("--seed", type=int, default=0, help="seed of weights, shuffling and latents")
    out = "folder for log, pictures and snapshots"
    add("--out", "-o", metavar="DIR", default="result", help=out)
    add("--resume", "-r", metavar="FILE", help="snapshot to resume from")
    add("--tensorboard", action="store_true", help="also write the log for TensorBoard")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--evaluate", action="store_true", help="do not train; evaluate best.npz in --out")
    add("--quiet", "-q", action="store_true", help="print only warnings and errors")
    args = parser.parse_args(argv)
    if min(args.epoch, args.batchsize, args.unit) < 1 or args.size < 8 or args.seed < 0:
        parser.error(
            "--epoch, --batchsize and --unit must be at least 1, --size at least 8, and --seed at "
            "least 0"
        )
    if args.channels_last:
        given = {"--gpu": args.gpu, "--mixed16": args.mixed16}
        given["CHAINER_COMPAT_CUDNN=1"] = os.environ.get("CHAINER_COMPAT_CUDNN") == "1"
        if missing := [name for name, is_given in given.items() if not is_given]:
            parser.error(f"--channels-last needs {', '.join(missing)}")
    return args


if __name__ == "__main__":
    main()
