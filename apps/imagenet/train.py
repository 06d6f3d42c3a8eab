#!/usr/bin/env python3
"""Train a convolutional network to tell what images show."""

import argparse
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import chainer
import matplotlib
import numpy as np
from chainer.optimizer_hooks import WeightDecay
from chainer.training import extensions

import chainermn
import data
import evaluation
import generated
import snapshots
import terminal
import training
import workers
from chainermn.extensions import AllreducePersistent, create_multi_node_checkpointer
from chainermn.links import create_mnbn_model
from models import ARCHITECTURES


def main() -> None:
    args = parse_arguments()
    workers.start_forkserver()  # before MPI is
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

    if args.drawn:
        generated.provide(args.root, comm)
    train = data.share(comm, lambda: data.ImageList.read(args.train))
    validation = data.share(comm, lambda: data.ImageList.read(args.val))
    data.check_files(train, args.root, comm)
    data.check_files(validation, args.root, comm)
    about = data.share(comm, lambda: describe(args, train))

    network = ARCHITECTURES[args.arch](len(about["classes"]))
    if args.initmodel:
        data.together(comm, lambda: snapshots.load_weights(args.initmodel, network))
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
    add_weight_decay(model, args.weight_decay)

    jobs = available_workers(comm) if args.loaderjob is None else args.loaderjob
    sampler = chainermn.datasets.create_distributed_sampler(train, comm, seed=args.seed)
    orders = data.EpochOrder(sampler)
    batches = data.create_iterator(
        data.Images(train, args.root, about["insize"], args.seed, args.least_area),
        args.batchsize,
        jobs,
        order_sampler=orders,
    )
    part = chainermn.scatter_index(len(validation), comm, force_equal_length=False)
    validation_batches = data.create_iterator(
        data.Images(validation.part(*part), args.root, about["insize"]),
        args.val_batchsize,
        jobs,
        repeat=False,
        shuffle=False,
    )

    to_batch = data.ToBatch(about["mean"], about["deviation"], args.skip_unreadable)
    updater = training.Updater(batches, optimizer, to_batch, device, args.seed, comm.rank)
    stop = (10, "iteration") if args.test else (args.epoch, "epoch")
    trainer = chainer.training.Trainer(updater, stop, out=args.out)
    peak = args.lr * args.batchsize * comm.size / 256
    trainer.extend(training.LearningRate(peak, args.epoch, args.warmup, args.schedule))
    evaluator = evaluation.TopKEvaluator(
        validation_batches, model, len(about["classes"]), to_batch, device
    )
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm, mean_over="examples")
    trigger = (10, "iteration") if args.test else (1, "epoch")
    trainer.extend(AllreducePersistent(model, comm), trigger=trigger)
    trainer.extend(evaluator, trigger=trigger)
    per_epoch = math.ceil(len(train) / comm.size) / args.batchsize
    if comm.rank == 0:
        iterations = 10 if args.test else math.ceil(args.epoch * per_epoch)
        add_reports(trainer, trigger, iterations, args.batchsize * comm.size)
    checkpointer = create_multi_node_checkpointer(f"{args.arch}-{comm.size}", comm, path=args.out)
    interval = args.checkpoint or min(math.ceil(per_epoch), 1000)
    # Not (interval, "iteration"): snapshots would have that under a name with the number of ranks.
    trainer.extend(checkpointer, trigger=lambda trainer: trainer.updater.iteration % interval == 0)

    @chainer.training.make_extension(trigger=stop, priority=checkpointer.priority + 1)
    def finish(trainer: chainer.training.Trainer) -> None:
        confusion = comm.allreduce_obj(evaluator.confusion)
        skipped = comm.allreduce_obj(to_batch.skipped)
        if comm.rank == 0:
            save(trainer, model.predictor, about, confusion)
            print_summary(trainer, skipped)

    # Before the last checkpoint is written and all of them are deleted.
    trainer.extend(finish)

    if args.resume:
        data.together(comm, lambda: snapshots.load_snapshot(args.resume, trainer, orders))
    else:
        checkpointer.maybe_load(trainer, optimizer)
    if comm.rank == 0 and updater.iteration:
        print(f"going on after iteration {updater.iteration}", flush=True)
    trainer.run()
    validation_batches.finalize()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("lists", metavar="TRAIN VAL", nargs="*", help="the same as --train TRAIN --val VAL")
    add("--train", metavar="LIST", help="file of lines 'path label'; by default, drawn images")
    add("--val", metavar="LIST", help="the same, of the images to validate with")
    add("--root", "-R", metavar="DIR", type=Path, help="what the paths of the lists start from")
    mean = "mean.json, or mean image (.npy) whose means of colours count; default: beside TRAIN"
    add("--mean", "-m", metavar="FILE", type=Path, help=mean)
    add("--classes", metavar="FILE", type=Path, help="names; default: classes.txt beside TRAIN")
    add("--arch", "-a", choices=sorted(ARCHITECTURES), help="default: small or resnet50")
    add("--batchsize", "-B", type=int, default=32, help="images of a process in one step")
    add("--val_batchsize", "-b", type=int, default=250, help="and in validation")
    add("--epoch", "-E", "-e", type=int, help="passes through the data; default: 20 or 90")
    add("--lr", type=float, help="learning rate for 256 images a step; default: 0.4 or 0.1")
    add("--warmup", type=float, help="epochs in which it rises; default: 1 or 5")
    add("--schedule", choices=["cosine", "step"], default="cosine", help="how it falls then")
    add("--weight-decay", type=float, default=1e-4, help="default: %(default)s")
    add("--label-smoothing", type=float, default=0.1, help="default: %(default)s")
    add("--least-area", type=float, help="least share of an image that is cut out at random")
    add("--mixed16", action="store_true", help="compute in float16, with float32 parameters")
    add("--mnbn", action="store_true", help="batch normalization over the batches of all ranks")
    add("--communicator", help="default: chosen for the hosts and GPUs at hand")
    add("--gpu", "-g", action="store_true", help="train on GPU")
    add("--loaderjob", "-j", type=int, help="processes that read images, of a rank; 0: itself")
    add("--skip-unreadable", action="store_true", help="do not end at images that are damaged")
    add("--seed", type=int, default=0, help="of the first weights and of all shuffling")
    add("--out", "-o", metavar="DIR", default="result", help="for log, pictures and snapshots")
    add("--initmodel", "-i", metavar="FILE", help="start from the weights in this model.npz")
    add("--resume", "-r", metavar="FILE", help="go on from this snapshot, not from checkpoints")
    add("--checkpoint", type=int, metavar="N", help="iterations; default: an epoch, at most 1000")
    add("--test", action="store_true", help="only ten iterations, to see whether all is well")
    args = parser.parse_intermixed_args()
    if args.lists:
        if args.train or args.val:
            parser.error("give the lists either as TRAIN VAL or as --train TRAIN --val VAL")
        if len(args.lists) != 2:
            parser.error(f"expected two lists, TRAIN and VAL, got {len(args.lists)}")
        args.train, args.val = args.lists
    if (args.train is None) != (args.val is None):
        parser.error("--train and --val belong together")
    drawn = args.train is None
    defaults = {
        "root": Path("generated") if drawn else Path(),
        "arch": "small" if drawn else "resnet50",
        "epoch": 20 if drawn else 90,
        "lr": 0.4 if drawn else 0.1,
        "warmup": 1 if drawn else 5,
        "least_area": 0.6 if drawn else 0.08,
    }
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if drawn:
        args.train, args.val = args.root / "train.txt", args.root / "val.txt"
    args.drawn = drawn
    return args


def describe(args: argparse.Namespace, train: data.ImageList) -> dict[str, Any]:
    """Return what has to be known to use the network."""
    folder = Path(args.train).parent
    classes = args.classes or folder / "classes.txt"
    means = [args.mean] if args.mean else [folder / "mean.json", folder / "mean.npy"]
    mean = next((path for path in means if args.mean or path.exists()), None)
    n_classes = int(train.labels.max()) + 1
    has_names = classes.exists() or args.classes
    names = classes.read_text(encoding="utf-8").splitlines() if has_names else []
    about = {"mean": [128] * 3, "deviation": [64] * 3}
    if mean:
        about = data.read_statistics(mean)
    return {
        "arch": args.arch,
        "insize": ARCHITECTURES[args.arch].insize,
        "classes": names + [str(i) for i in range(len(names), n_classes)],
        **about,
    }


def available_workers(comm: chainermn.CommunicatorBase) -> int:
    """Return this rank's share of the cores of its host."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // comm.intra_size)


def add_weight_decay(model: chainer.Link, rate: float) -> None:
    """Let weights decay, but not biases, nor the scales of batch normalization."""
    for name, parameter in model.namedparams():
        if name.endswith("/W"):
            parameter.update_rule.add_hook(WeightDecay(rate))


def add_reports(
    trainer: chainer.training.Trainer, trigger: tuple[int, str], iterations: int, images: int
) -> None:
    """Report on a training of so many iterations, each with so many images of all ranks."""

    def add_speed(row: dict[str, float]) -> None:
        row["images/s"] = images / row.pop("seconds")
        left = row["elapsed_time"] * (iterations / row["iteration"] - 1)
        row["minutes left"] = max(left, 0) / 60

    trainer.extend(extensions.observe_lr(), trigger=trigger)
    trainer.extend(extensions.LogReport(trigger=trigger, postprocess=add_speed))
    snapshot = extensions.snapshot(filename="snapshot_epoch_{.updater.epoch}", n_retains=3)
    trainer.extend(snapshot, trigger=trigger)

    matplotlib.use("Agg")  # draws into files, whether there is a screen or not
    for quantity in ("loss", "accuracy"):
        curves = [f"main/{quantity}", f"validation/main/{quantity}"]
        curves += ["validation/main/top5"] * (quantity == "accuracy")
        plot = extensions.PlotReport(curves, "epoch", trigger=trigger, filename=f"{quantity}.png")
        trainer.extend(plot)

    columns = ["epoch", "main/loss", "validation/main/loss", "main/accuracy"]
    columns += ["validation/main/accuracy", "validation/main/top5", "images/s", "minutes left"]
    if terminal.is_watched():
        trainer.extend(extensions.PrintReport(columns))
        trainer.extend(extensions.ProgressBar(iterations, update_interval=10))
    else:
        trainer.extend(extensions.PrintReport(columns, out=terminal.PlainOutput()))


def save(
    trainer: chainer.training.Trainer,
    network: chainer.Link,
    about: dict[str, Any],
    confusion: np.ndarray,
) -> None:
    """Write what predict.py needs, and the picture of the confusion matrix."""
    out = Path(trainer.out)
    chainer.serializers.save_npz(out / "model.npz", network)
    (out / "model.json").write_text(json.dumps(about) + "\n")
    evaluation.draw_confusion(confusion, about["classes"], out / "confusion.png")


def print_summary(trainer: chainer.training.Trainer, skipped: int) -> None:
    last = trainer.get_extension("LogReport").log[-1]
    accuracy, epoch = last["validation/main/accuracy"], last["epoch"]
    plural = "epoch" if epoch == 1 else "epochs"
    print(f"{accuracy:.2%} of the validation images recognised after {epoch} {plural}")
    if skipped:
        print(f"images skipped in all epochs, as they could not be read: {skipped}")
    files = "accuracy.png,loss.png,confusion.png,log,model.npz"
    print(f"curves, log and network: {Path(trainer.out).resolve()}/{{{files}}}")


if __name__ == "__main__":
    main()
