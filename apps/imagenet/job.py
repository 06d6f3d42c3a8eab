"""Ranks, images, network and optimizer of a training, from the arguments."""

import argparse
import re
import warnings
from pathlib import Path
from typing import Any

import chainer
import numpy as np

import batches
import chainermn
import data
import generated
import images
import training
import weights
from chainermn.agreement import exit_together, run_on_root
from chainermn.datasets.names import check_labels, read_names, shown
from chainermn.files import read_json
from chainermn.links import create_mnbn_model
from chainermn.optimizers import GradientClipping
from inspection import SECONDS, Inspection
from lists import MOST_CLASSES, ImageList
from models import ARCHITECTURES


def start(args: argparse.Namespace) -> tuple[chainermn.CommunicatorBase, chainer.backend.Device]:
    """Connect the ranks, and select this rank's device, seed and dtype."""
    chainermn.iterators.start_forkserver()
    comm = chainermn.create_communicator(args.communicator)
    if comm.rank == 0:
        kind = type(comm).__name__
        print(f"ranks: {comm.size}, hosts: {comm.inter_size}, communicator: {kind}", flush=True)
    with exit_together(comm):
        device = chainermn.choose_device(comm, gpu=args.gpu)
    np.random.seed(args.seed)
    device.xp.random.seed(args.seed)
    chainer.global_config.dtype = chainer.mixed16 if args.mixed16 else np.float32
    # The job would wait for a worker that hangs.
    warnings.simplefilter("error", chainer.iterators.MultiprocessIterator.TimeoutWarning)
    return comm, device


def load_lists(
    args: argparse.Namespace, comm: chainermn.CommunicatorBase
) -> tuple[batches.Source, batches.Source, dict[str, Any], Inspection]:
    """Return the training images, the validation images, and the result of `describe`.

    The last is what looks at the files: unless it is settled, it must extend the trainer.

    Raises as `batches.load`, `Inspection.settle` and `check_left` do.
    """
    if args.drawn:
        generated.provide(args.root, comm)
    train, validation = (
        batches.load(path, args.root, comm, args.allow_outside) for path in (args.train, args.val)
    )
    is_trained = args.evaluate is None
    looks = [(validation, images.check_header)]
    if is_trained:
        # An epoch would be lost if a file to validate with were found to be damaged after it.
        looks = [(validation, images.check_file), (train, images.check_header)]
    inspection = Inspection(looks, args.root, comm, args.skip_unreadable)
    about = run_on_root(comm, 0, "lists", lambda: describe(args, train, validation))
    has_time = args.skip_unreadable or args.test or not is_trained
    validation, *rest = inspection.settle(None if has_time else SECONDS)
    if rest and isinstance(train, ImageList):
        check_left(train, rest[0], about["classes"])
    return rest[0] if rest else train, validation, about, inspection


def check_left(before: ImageList, after: ImageList, names: list[str]) -> None:
    """Raise OSError if too few images of a class can be read."""
    for label, left, total in before.hardly_left(after):
        name = f"class {label} {shown(names[label])}"
        raise OSError(
            f"{before.source}: only {left} of {total} images of {name} can be read: "
            "get them again, or delete their lines and run without --skip-unreadable"
        )


def describe(
    args: argparse.Namespace, train: batches.Source, validation: batches.Source
) -> dict[str, Any]:
    """Return what users of the network need to know.

    Raises
    ------
    OSError, ValueError
        Also if a label has no name, or an image to validate with is of an unknown class.
    """
    folder = Path(args.train) if Path(args.train).is_dir() else Path(args.train).parent
    classes = args.classes or folder / "classes.txt"
    means = [args.mean] if args.mean else [folder / "mean.json", folder / "mean.npy"]
    mean = next((path for path in means if args.mean or path.exists()), None)
    has_names = classes.exists() or args.classes
    if has_names:
        names = read_names(classes, MOST_CLASSES)
        check_order(names, classes)
        for path, source in ((args.train, train), (args.val, validation)):
            check_labels(source.labels, names, path)
    else:
        names = [str(label) for label in range(train.n_classes)]
    if validation.n_classes > len(names):
        raise ValueError(
            f"{args.val} has images of class {validation.n_classes - 1}, but {args.train} has "
            f"only the classes 0 to {len(names) - 1}"
        )
    about = {"mean": [128] * 3, "deviation": [64] * 3}
    if mean:
        about = data.read_statistics(mean)
    return {
        "arch": args.arch,
        "insize": ARCHITECTURES[args.arch].insize,
        "classes": names,
        **about,
    }


def check_order(names: list[str], source: Path) -> None:
    """Raise ValueError if lines say that their names are in another order than the labels."""
    if all("\t" in name for name in names):
        raise ValueError(
            f"{source}: expected names in the order of the labels, got lines with tabs: lines "
            "FOLDER<tab>NAME are for prepare.py --classes, which writes classes.txt"
        )
    numbers = [int(found[1]) for name in names if (found := re.match(r"(\d{1,9})[ :,]", name))]
    # Folders without leading zeros are sorted as text, and so are their names.
    if len(numbers) == len(names) and numbers != sorted(numbers) and names != sorted(names):
        raise ValueError(
            f"{source}: line 1 is the name of class 0, line 2 that of class 1, and so on, got "
            f"lines numbered {', '.join(map(str, numbers[:5]))}: sort them, if these are labels, "
            "or else remove the numbers"
        )


def create_network(
    args: argparse.Namespace, comm: chainermn.CommunicatorBase, about: dict[str, Any]
) -> chainer.Link:
    """Return the network with its initial weights.

    Raises
    ------
    SystemExit
        On all ranks, if the weights cannot be loaded on any.
    """
    network = ARCHITECTURES[args.arch](len(about["classes"]))
    with exit_together(comm):
        if args.initmodel:
            load_initial_weights(network, args, comm)
        if args.evaluate is not None:
            path = Path(args.evaluate or Path(args.out, "best.npz"))
            check_classes(path, about["classes"])
            weights.load_weights(path, network)
    return network


def check_classes(path: Path, classes: list[str]) -> None:
    """Raise ValueError if the description beside the weights has other classes."""
    description = path.with_name("model.json")
    if description.exists() and read_json(description, {"classes": [str]})["classes"] != classes:
        raise ValueError(
            f"{path} was trained with other classes than these lists have: give the lists, --root "
            "and --arch of its training"
        )


def load_initial_weights(
    network: chainer.Link, args: argparse.Namespace, comm: chainermn.CommunicatorBase
) -> None:
    """Load initial weights; rank 0 says which, unless all are loaded.

    Raises
    ------
    OSError, ValueError
    """
    head = weights.head_of(ARCHITECTURES[args.arch]) if args.finetune else set()
    loaded = weights.load_weights(args.initmodel, network, but=head)
    if args.finetune and comm.rank == 0:
        new = ", ".join(sorted(head))
        print(f"{len(loaded)} arrays of {args.initmodel} loaded; new: {new}", flush=True)


def create_model(
    network: chainer.Link,
    args: argparse.Namespace,
    comm: chainermn.CommunicatorBase,
    device: chainer.backend.Device,
) -> tuple[training.Classifier, chainer.Optimizer]:
    """Return the network with its loss, and the optimizer that trains it on all ranks.

    Raises
    ------
    SystemExit
        On all ranks, if layers to freeze do not exist.
    """
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
    return model, optimizer
