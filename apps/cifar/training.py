"""A training by all ranks of a communicator, for `train.py` and for each trial of `search.py`."""

import argparse
import math
import os
from collections.abc import Sequence

import chainer
import numpy as np
from chainer.datasets import TupleDataset
from chainer.iterators import SerialIterator
from chainer.optimizer_hooks import WeightDecay
from chainer.training import Extension, StandardUpdater, Trainer, extensions

import chainermn
import data
from chainermn.agreement import exit_together
from chainermn.extensions import StepSeed
from chainermn.links import create_mnbn_model
from model import ResNet

LOSS, ACCURACY = "validation/main/loss", "validation/main/accuracy"
# Options of both scripts that do not change the result.
FREE = {"data", "communicator", "gpu", "graphs", "channels_last", "out"}


def add_arguments(parser: argparse.ArgumentParser, epoch: int) -> None:
    """Add the options of both scripts to a parser; ``epoch`` is the default of ``--epoch``."""
    add = parser.add_argument
    add("--dataset", choices=data.DATASETS, default="shapes", help="default: %(default)s")
    add("--data", metavar="PATH", help="folder or .tar.gz with CIFAR, in any of its formats")
    add("--examples", type=int, metavar="N", help="train and validate with N images only")
    add("--no-augment", action="store_true", help="do not mirror and shift images at random")
    add("--batchsize", "-b", type=int, default=25, help="batch size per process")
    add("--epoch", "-e", type=int, default=epoch, help="number of epochs")
    add("--communicator", help="default: chosen for your hosts and GPUs")
    add("--gpu", "-g", action="store_true", help="train on GPU")
    add("--graphs", action="store_true", help="launch each step on the GPU as one CUDA graph")
    add("--mixed16", action="store_true", help="compute in float16, with float32 parameters")
    last = "store images channels last, as tensor cores need them"
    add("--channels-last", action="store_true", help=last)
    add("--seed", type=int, default=0, help="seed of weights and random choices")
    add("--out", "-o", metavar="DIR", default="result", help="folder for all output")


def checked(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; end the program if a number makes no sense."""
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = 0 if isinstance(value, float) or name == "seed" else 1
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if args.graphs and not args.gpu:
        parser.error("--graphs needs --gpu")
    if args.channels_last:
        given = {"--gpu": args.gpu, "--mixed16": args.mixed16}
        given["CHAINER_COMPAT_CUDNN=1"] = os.environ.get("CHAINER_COMPAT_CUDNN") == "1"
        if missing := [name for name, is_given in given.items() if not is_given]:
            parser.error(f"--channels-last needs {', '.join(missing)}")
    return args


def start(args: argparse.Namespace) -> tuple[chainermn.CommunicatorBase, chainer.backend.Device]:
    """Connect the ranks, and select this rank's device and dtype."""
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
    return comm, device


def create_trainer(
    args: argparse.Namespace,
    comm: chainermn.CommunicatorBase,
    device: chainer.backend.Device,
    images: data.Images,
) -> tuple[Trainer, chainer.Chain]:
    """Return a trainer that validates after each epoch, and its network. Collective.

    Parameters
    ----------
    args : argparse.Namespace
        Arguments that `add_arguments` adds, and ``unit``, ``dropout``, ``lr`` and
        ``weight_decay``.
    comm : CommunicatorBase
        Communicator of the ranks that train together.
    device : chainer.backend.Device
    images : data.Images
        All images, on every rank.
    """
    np.random.seed(args.seed)
    device.xp.random.seed(args.seed)
    network = create_mnbn_model(ResNet(args.unit, len(images.classes), args.dropout), comm)
    model = chainer.links.Classifier(network)
    model.to_device(device)
    optimizer = chainer.optimizers.MomentumSGD(momentum=0.9)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    if args.graphs:
        optimizer.use_cuda_graphs()
    if args.mixed16:
        optimizer.use_fp32_update()
        optimizer.loss_scaling()
    for name, parameter in model.namedparams():
        if name.endswith("/W"):  # neither biases nor the scales of batch normalization
            parameter.update_rule.add_hook(WeightDecay(args.weight_decay))

    order = chainermn.datasets.create_distributed_sampler(images.train, comm, seed=args.seed)
    train = data.normalized(images.train, augment=not args.no_augment)
    batches = SerialIterator(train, args.batchsize, order_sampler=order)
    updater = StandardUpdater(batches, optimizer, device=device)
    trainer = Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(StepSeed(args.seed, comm))
    trainer.extend(LearningRate(args.lr * args.batchsize * comm.size / 100, args.epoch))
    trainer.extend(create_evaluator(comm, model, images.validation, device))
    return trainer, network


def create_evaluator(
    comm: chainermn.CommunicatorBase,
    model: chainer.Chain,
    dataset: TupleDataset,
    device: chainer.backend.Device,
    batchsize: int = 100,
) -> extensions.Evaluator:
    """Return an evaluator that is exact over all ranks. Collective."""
    own = chainermn.scatter_dataset(dataset, comm, force_equal_length=False)
    batches = SerialIterator(data.normalized(own), batchsize, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(batches, model, device=device)
    return chainermn.create_multi_node_evaluator(evaluator, comm, mean_over="examples")


class LearningRate(Extension):
    """Sets the learning rate of every step: up in the first fifth, then down along a cosine.

    One such cycle trains faster than a constant rate (Smith and Topin, 2018).

    Parameters
    ----------
    peak : float
    epochs : int
        Number of epochs of the whole training.
    """

    trigger = 1, "iteration"
    RISE = 0.2

    def __init__(self, peak: float, epochs: int) -> None:
        self.peak, self.epochs = peak, epochs

    def at(self, epoch: float) -> float:
        """Return the rate of the step that starts when ``epoch`` epochs are over."""
        done = min(epoch / self.epochs, 1)
        if done < self.RISE:
            return self.peak * (0.1 + 0.9 * done / self.RISE)
        return self.peak * (1 + math.cos(math.pi * (done - self.RISE) / (1 - self.RISE))) / 2

    def initialize(self, trainer: Trainer) -> None:
        """Set the rate of the first step, also after resuming."""
        self(trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Set the rate of the next step."""
        trainer.updater.get_optimizer("main").lr = self.at(trainer.updater.epoch_detail)
