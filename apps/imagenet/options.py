"""The options of train.py and lr_range.py, and which of them change the result."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chainermn.files import optional_path
from models import ARCHITECTURES

# A run can be resumed with other values of these; the rest are its settings. The contents of the
# lists are compared instead of their names.
NO_SETTINGS = {
    *("lists", "train", "val", "root", "mean", "classes", "drawn"),
    *("val_batchsize", "epoch", "communicator", "gpu", "graphs", "channels_last", "loaderjob"),
    *("prefetch", "skip_unreadable", "allow_outside", "out", "resume", "evaluate", "tensorboard"),
    *("quiet", "test"),
}


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Add the options of train.py to a parser, and parse the arguments."""
    add = parser.add_argument
    add("lists", metavar="TRAIN VAL", nargs="*", help="the same as --train TRAIN --val VAL")
    train = "file of lines 'path label', or folder of shards; default: drawn images"
    add("--train", metavar="LIST", help=train)
    add("--val", metavar="LIST", help="the same for the validation images")
    root = "folder that the lists' paths start from"
    add("--root", "-R", metavar="DIR", type=optional_path, help=root)
    mean = "mean.json, or mean image (.npy) for the mean of each color; default: beside TRAIN"
    add("--mean", "-m", metavar="FILE", type=optional_path, help=mean)
    classes = "class names; default: classes.txt beside TRAIN"
    add("--classes", metavar="FILE", type=optional_path, help=classes)
    arch = "default: that of --initmodel; or small for drawn images, else resnet50"
    add("--arch", "-a", choices=sorted(ARCHITECTURES), help=arch)
    add("--batchsize", "-B", type=int, default=32, help="batch size per process")
    add("--val_batchsize", "-b", type=int, default=250, help="the same in validation")
    add("--epoch", "-E", "-e", type=int, help="number of epochs; default: 20 for small, else 90")
    add("--lr", type=float, help="rate for 256 images per step; default: 0.4 for small, else 0.1")
    add("--warmup", type=float, help="epochs in which --lr rises; default: 1 for small, else 5")
    schedule = "how the rate falls after that"
    add("--schedule", choices=["cosine", "step"], default="cosine", help=schedule)
    add("--weight-decay", type=float, default=1e-4, help="default: %(default)s")
    add("--label-smoothing", type=float, default=0.1, help="default: %(default)s")
    least = "least share of an image in a random crop; default: 0.6 for small, else 0.08"
    add("--least-area", type=float, metavar="SHARE", help=least)
    add("--mixed16", action="store_true", help="compute in float16, with float32 parameters")
    add("--mnbn", action="store_true", help="batch normalization over the batches of all ranks")
    add("--communicator", help="default: chosen for your hosts and GPUs")
    add("--gpu", "-g", action="store_true", help="train on GPU")
    add("--graphs", action="store_true", help="launch each step on the GPU as one CUDA graph")
    last = "store images channels last, as tensor cores need them"
    add("--channels-last", action="store_true", help=last)
    add("--loaderjob", "-j", type=int, help="worker processes per rank that read images; 0: none")
    ahead = "with --gpu, convert batches and copy them while the GPU computes"
    add("--prefetch", action="store_true", help=ahead)
    add("--skip-unreadable", action="store_true", help="skip damaged images")
    outside = "allow paths in the lists, and links, that lead out of --root"
    add("--allow-outside", action="store_true", help=outside)
    add("--seed", type=int, default=0, help="seed of initial weights and shuffling")
    out = "folder for log, pictures and snapshots"
    add("--out", "-o", metavar="DIR", default="result", help=out)
    add("--initmodel", "-i", metavar="FILE", help="start from these weights: NPZ, or PyTorch's")
    add("--finetune", action="store_true", help="do not load the head of --initmodel")
    add("--freeze", metavar="LAYER", nargs="+", default=[], help="layers that are not trained")
    add("--clip", type=float, metavar="NORM", help="largest norm of the mean gradient")
    add("--ema", type=float, metavar="DECAY", help="evaluate and keep averaged weights")
    resume = "resume from this snapshot; default: the newest in OUT"
    add("--resume", "-r", metavar="FILE", help=resume)
    add("--checkpoint", type=int, default=1000, metavar="N", help="iterations between snapshots")
    add("--tensorboard", action="store_true", help="also write the log for TensorBoard")
    add("--test", action="store_true", help="only ten iterations, to see whether it works")
    add = parser.add_mutually_exclusive_group().add_argument
    evaluate = "do not train; evaluate these weights; default: best.npz in OUT"
    add("--evaluate", metavar="FILE", nargs="?", const="", help=evaluate)
    add("--quiet", "-q", action="store_true", help="print only warnings and errors")
    args = parser.parse_intermixed_args(argv)
    if args.lists:
        if args.train or args.val:
            parser.error("give the lists either as TRAIN VAL or as --train TRAIN --val VAL")
        if len(args.lists) != 2:
            parser.error(f"expected two lists, TRAIN and VAL, got {len(args.lists)}")
        args.train, args.val = args.lists
    if bool(args.train) != bool(args.val):
        parser.error("--train and --val belong together")
    if args.finetune and not args.initmodel:
        parser.error("--finetune needs initial weights: add --initmodel FILE")
    if args.ema is not None and args.mixed16:
        parser.error("--ema averages weights in float32, which --mixed16 does not have")
    if args.graphs and not args.gpu:
        parser.error("--graphs needs --gpu")
    if args.channels_last:
        given = {"--gpu": args.gpu, "--mixed16": args.mixed16}
        given["CHAINER_COMPAT_CUDNN=1"] = os.environ.get("CHAINER_COMPAT_CUDNN") == "1"
        if missing := [name for name, is_given in given.items() if not is_given]:
            parser.error(f"--channels-last needs {', '.join(missing)}")
    drawn = not args.train
    if args.root is None:
        args.root = Path("generated") if drawn else Path()
    if drawn:
        args.train, args.val = args.root / "train.txt", args.root / "val.txt"
    args.drawn = drawn
    if args.arch or not (args.initmodel or args.evaluate is not None):
        choose(args, args.arch)
    check_numbers(parser, args)
    if args.test:  # not among the files of a real run
        args.out = str(Path(args.out, "test"))
    return args


def choose(args: argparse.Namespace, arch: str | None) -> None:
    """Set the network, by default one for the images, and all options whose defaults it decides.

    Without --arch, weights tell the network, which `parse_arguments` does not read.
    """
    args.arch = arch or ("small" if args.drawn else "resnet50")
    is_small = args.arch == "small"
    defaults = {
        "epoch": 20 if is_small else 90,
        "lr": 0.4 if is_small else 0.1,
        "warmup": 1 if is_small else 5,
        "least_area": 0.6 if is_small else 0.08,
    }
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program if an option makes no sense."""
    for name in ("batchsize", "val_batchsize", "epoch", "checkpoint"):
        number = getattr(args, name)
        if number is not None and number < 1:
            parser.error(f"--{name} must be at least 1, got {number}")
    if args.seed < 0:
        parser.error(f"--seed must be at least 0, got {args.seed}")
    if args.clip is not None and not args.clip > 0:
        parser.error(f"--clip must be above 0, got {args.clip}")
    if args.ema is not None and not 0 < args.ema < 1:
        parser.error(f"--ema must be between 0 and 1, got {args.ema}")


def settings_of(
    args: argparse.Namespace, about: dict[str, Any], digests: dict[str, str]
) -> dict[str, Any]:
    """Return what changes the result of a run.

    Parameters
    ----------
    args : argparse.Namespace
    about : dict
        What users of the network need to know.
    digests : dict of str
        Digests of the images.
    """
    chosen = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
    seen = {name: about[name] for name in ("insize", "mean", "deviation")}
    return {**chosen, **seen, **digests, "classes": len(about["classes"])}
