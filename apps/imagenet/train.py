#!/usr/bin/env python3
"""Train a convolutional network to tell what images show."""

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from chainer.training import extensions

import batches
import chainermn
import data
import evaluation
import generated
import options
import reports
import training
import weights
from chainermn.agreement import exit_together, run_on_root
from chainermn.extensions import AllreducePersistent, StepSeed, multi_node_snapshot, record_run
from chainermn.links import create_mnbn_model
from chainermn.optimizers import GradientClipping
from models import ARCHITECTURES


def main() -> None:
    args = options.parse_arguments()
    chainermn.iterators.start_forkserver()
    comm = chainermn.create_communicator(args.communicator)
    if comm.rank == 0:
        kind = type(comm).__name__
        print(f"ranks: {comm.size}, hosts: {comm.inter_size}, communicator: {kind}", flush=True)
    device = chainer.get_device(f"@cupy:{comm.intra_rank}" if args.gpu else "@numpy")
    device.use()
    np.random.seed(args.seed)
    device.xp.random.seed(args.seed)
    chainer.global_config.dtype = chainer.mixed16 if args.mixed16 else np.float32
    # A worker that hangs would be waited for.
    warnings.simplefilter("error", chainer.iterators.MultiprocessIterator.TimeoutWarning)

    with exit_together(comm):
        train, validation, about = load_lists(args, comm)
    network = ARCHITECTURES[args.arch](len(about["classes"]))
    with exit_together(comm):
        if args.initmodel:
            load_initial_weights(network, args, comm)
        if args.evaluate is not None:
            weights.load_weights(args.evaluate or Path(args.out, "best.npz"), network)
    average = copy.deepcopy(network) if args.ema else None
    model = training.Classifier(network, args.label_smoothing)
    if args.mnbn:
        model = create_mnbn_model(model, comm)
    model.to_device(device)
    optimizer = chainer.optimizers.MomentumSGD(momentum=0.9)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    if args.mixed16:
        optimizer.use_fp32_update()
        optimizer.loss_scaling()
    training.add_weight_decay(model, args.weight_decay)
    if args.clip:
        optimizer.add_hook(GradientClipping(args.clip))
    with exit_together(comm):
        training.freeze(model.predictor, args.freeze)
        iterators = batches.create_iterators(args, comm, train, validation, about)
    training_batches, validation_batches = iterators
    to_batch = data.ToBatch(about["mean"], about["deviation"], args.skip_unreadable)
    updater = chainer.training.StandardUpdater(training_batches, optimizer, to_batch, device)
    end = (10, "iteration") if args.test else (args.epoch, "epoch")
    trigger = end if args.test else (1, "epoch")
    trainer = chainer.training.Trainer(updater, end, out=args.out)
    trainer.extend(StepSeed(args.seed, comm))
    peak = args.lr * args.batchsize * comm.size / 256
    trainer.extend(training.LearningRate(peak, args.epoch, args.warmup, args.schedule))
    evaluated = model
    if average is not None:
        evaluated = training.Classifier(average)
        evaluated.to_device(device)
        trainer.extend(training.MovingAverage(average, model.predictor, args.ema))
    evaluator = evaluation.TopKEvaluator(
        validation_batches, evaluated, len(about["classes"]), to_batch, device
    )
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm, mean_over="examples")
    trainer.extend(evaluator, trigger=trigger)
    picture = evaluation.ConfusionPicture(comm, evaluator, about["classes"])
    trainer.extend(picture, trigger=trigger)
    if args.evaluate is not None:
        found = evaluator()
        validation_batches.finalize()
        if comm.rank == 0:
            reports.print_evaluation(found)
        return

    with exit_together(comm):
        record_run(comm, vars(args), args.out)
        if comm.rank == 0:
            reports.save_description(args.out, about)
            reports.add_reports(trainer, evaluated.predictor, args, comm.size, trigger)
    snapshot = extensions.snapshot(n_retains=3)
    settings = options.settings_of(args, about, len(train))
    snapshot = multi_node_snapshot(comm, snapshot, [], settings=settings)
    interval = training.EpochOrInterval(args.checkpoint)
    trainer.extend(snapshot, trigger=interval)
    # What batch normalization counts differs from rank to rank, and a snapshot has one for all.
    trainer.extend(AllreducePersistent(model, comm), trigger=interval)
    with exit_together(comm):
        snapshot.resume(trainer, args.resume)
    trainer.run()

    skipped = comm.allreduce_obj(to_batch.skipped)
    if comm.rank == 0:
        reports.print_summary(trainer, skipped)


def load_lists(
    args: argparse.Namespace, comm: chainermn.CommunicatorBase
) -> tuple[batches.Source, batches.Source, dict[str, Any]]:
    """Return the images to train on, those to validate with, and what `describe` says.

    Raises as `batches.load` does.
    """
    if args.drawn:
        generated.provide(args.root, comm)
    train, validation = (batches.load(path, args.root, comm) for path in (args.train, args.val))
    return train, validation, run_on_root(comm, 0, "lists", lambda: describe(args, train))


def describe(args: argparse.Namespace, train: batches.Source) -> dict[str, Any]:
    """Return what has to be known to use the network."""
    folder = Path(args.train) if Path(args.train).is_dir() else Path(args.train).parent
    classes = args.classes or folder / "classes.txt"
    means = [args.mean] if args.mean else [folder / "mean.json", folder / "mean.npy"]
    mean = next((path for path in means if args.mean or path.exists()), None)
    has_names = classes.exists() or args.classes
    names = classes.read_text(encoding="utf-8").splitlines() if has_names else []
    about = {"mean": [128] * 3, "deviation": [64] * 3}
    if mean:
        about = data.read_statistics(mean)
    return {
        "arch": args.arch,
        "insize": ARCHITECTURES[args.arch].insize,
        "classes": names + [str(i) for i in range(len(names), train.n_classes)],
        **about,
    }


def load_initial_weights(
    network: chainer.Link, args: argparse.Namespace, comm: chainermn.CommunicatorBase
) -> None:
    """Load the weights to begin with; rank 0 says which of them, if that is not all.

    Raises
    ------
    OSError, ValueError
    """
    head = weights.head_of(ARCHITECTURES[args.arch]) if args.finetune else set()
    loaded = weights.load_weights(args.initmodel, network, but=head)
    if args.finetune and comm.rank == 0:
        new = ", ".join(sorted(head))
        print(f"{len(loaded)} arrays of {args.initmodel} loaded; new: {new}", flush=True)


if __name__ == "__main__":
    main()
