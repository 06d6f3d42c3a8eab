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
import options
import training
import weights
from chainermn.agreement import exit_together, run_on_root
from chainermn.datasets.names import check_labels, read_names, shown
from chainermn.links import create_mnbn_model
from chainermn.optimizers import GradientClipping
from inspection import SECONDS, Inspection
from lists import MOST_CLASSES, ImageList
from models import ARCHITECTURES, create


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
    if args.channels_last:
        chainer.global_config.compute_mode = "cudnn_fast"
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
    known = run_on_root(comm, 0, "weights", lambda: known_of(args))
    if args.arch is None:
        options.choose(args, known.get("arch"))
        if known and comm.rank == 0:
            print(f"network: {args.arch}, as in {weights_of(args)}", flush=True)
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
    about = run_on_root(comm, 0, "lists", lambda: describe(args, train, validation, known))
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


def weights_of(args: argparse.Namespace) -> Path | None:
    """Return the file of the weights to start from, or to evaluate; None without any."""
    if args.evaluate is not None:
        return Path(args.evaluate or Path(args.out, "best.npz"))
    return Path(args.initmodel) if args.initmodel else None


def known_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what is known of the network that the weights are of; see `weights.Weights`."""
    path = weights_of(args)
    if path is None:
        return {}
    with weights.open_weights(path, args.arch) as found:
        return found.about


def describe(
    args: argparse.Namespace,
    train: batches.Source,
    validation: batches.Source,
    known: dict[str, Any],
) -> dict[str, Any]:
    """Return what users of the network need to know.

    Parameters
    ----------
    args : argparse.Namespace
    train, validation : batches.Source
    known : dict
        What is known of the weights. Their normalization goes before that of the lists.

    Raises
    ------
    OSError, ValueError
        Also if a label has no name, or an image to validate with is of an unknown class, or
        --mean is not what the weights need.
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
    if args.evaluate is not None and known.get("classes", names) != names:
        raise ValueError(
            f"{weights_of(args)} was trained with other classes than these lists have: give the "
            "lists and --root of its training"
        )
    about = {"mean": [128] * 3, "deviation": [64] * 3}
    if mean:
        about = data.read_statistics(mean)
    if "mean" in known:
        about = choose_colors(about, {name: known[name] for name in about}, args)
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


def choose_colors(
    own: dict[str, list[float]], known: dict[str, list[float]], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the mean and deviation that weights were trained with, instead of others.

    Raises
    ------
    ValueError
        If the others were given as --mean.
    """
    if not all(np.allclose(own[name], known[name], rtol=1e-5) for name in own):
        shown = ", ".join(
            f"{name} {' '.join(f'{value:.6g}' for value in known[name])}" for name in known
        )
        path = weights_of(args)
        if args.mean:
            raise ValueError(f"{path} was trained with {shown}, not with {args.mean}: omit --mean")
        print(f"colors: {shown}, as {path} was trained with", flush=True)
    return known


def create_network(
    args: argparse.Namespace, comm: chainermn.CommunicatorBase, about: dict[str, Any]
) -> chainer.Link:
    """Return the network with its initial weights.

    Rank 0 says which of them are loaded, unless all are.

    Raises
    ------
    SystemExit
        On all ranks, if the weights cannot be loaded on any.
    """
    path, n_out = weights_of(args), len(about["classes"])
    if path is None:
        return create(args.arch, n_out)
    with exit_together(comm):
        is_new = args.finetune and args.evaluate is None
        head = weights.head_of(ARCHITECTURES[args.arch]) if is_new else set()
        network, loaded = weights.load_network(path, args.arch, n_out, head)
    if head and comm.rank == 0:
        new = ", ".join(sorted(head))
        print(f"{len(loaded)} arrays of {path} loaded; new: {new}", flush=True)
    return network


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
    if args.graphs:
        optimizer.use_cuda_graphs()
    if args.mixed16:
        optimizer.use_fp32_update()
        optimizer.loss_scaling()
    training.add_weight_decay(model, args.weight_decay)
    if args.clip:
        optimizer.add_hook(GradientClipping(args.clip))
    with exit_together(comm):
        training.freeze(model.predictor, args.freeze)
    return model, optimizer
