"""What a run writes and prints, on rank 0: log, curves and networks."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chainer
import matplotlib
import numpy as np
from chainer.serializers import save_npz
from chainer.training import extensions

from batches import Source
from chainermn import CommunicatorBase
from chainermn.datasets.names import shown
from chainermn.datasets.overview import draw_examples, show_classes
from chainermn.extensions import BestModel, TensorBoardReport, TerminalReport, Throughput
from chainermn.files import atomic_write
from data import Images, ToBatch, Unreadable
from inspection import told
from lists import ImageList

ACCURACY = "validation/main/accuracy"
# Compressing weights takes more than ten times as long, and saves almost no space.
save = partial(save_npz, compression=False)


def add_reports(
    trainer: chainer.training.Trainer,
    network: chainer.Link,
    args: argparse.Namespace,
    n_ranks: int,
    trigger: tuple[int, str],
) -> None:
    """Extend the trainer, after the evaluator and with its trigger."""
    trainer.extend(BestModel(network, ACCURACY), trigger=trigger)
    trainer.extend(extensions.snapshot_object(network, "model.npz", save), trigger=trigger)
    trainer.extend(extensions.observe_lr(), trigger=trigger)
    trainer.extend(Throughput("images", args.batchsize, n_ranks), trigger=trigger)
    trainer.extend(extensions.LogReport(trigger=trigger))
    if args.tensorboard:
        trainer.extend(TensorBoardReport())

    matplotlib.use("Agg")  # draws into files, even without a screen
    for quantity in ("loss", "accuracy"):
        curves = [f"main/{quantity}", f"validation/main/{quantity}"]
        curves += ["validation/main/top5"] * (quantity == "accuracy")
        plot = extensions.PlotReport(curves, "epoch", trigger=trigger, filename=f"{quantity}.png")
        trainer.extend(plot)

    columns = ["epoch", "main/loss", "validation/main/loss", "main/accuracy"]
    columns += [ACCURACY, "validation/main/top5", "images/s", "minutes left"]
    trainer.extend(TerminalReport(columns))


class SkippedFiles(chainer.training.Extension):
    """Says which files the ranks could not read, once for each.

    Parameters
    ----------
    comm : CommunicatorBase
    to_batch : data.ToBatch

    Attributes
    ----------
    known : dict of str
        What is wrong with the files of all ranks, by their names.
    """

    priority = chainer.training.PRIORITY_READER  # after the evaluator

    def __init__(self, comm: CommunicatorBase, to_batch: ToBatch) -> None:
        self.comm, self.to_batch = comm, to_batch
        self.known: dict[str, str] = {}

    def __call__(self, trainer: chainer.training.Trainer | None = None) -> None:
        """Say, on rank 0, which files are new. Collective."""
        before = len(self.known)
        for part in self.comm.allgather_obj(self.to_batch.skipped):
            for path, text in part.items():
                self.known.setdefault(path, text)
        if self.comm.rank == 0:
            for line in told([*self.known.values()][before:]):
                print(f"skipped: {line}", file=sys.stderr, flush=True)


def show_images(
    out: str | Path,
    names: Sequence[str],
    train: Source,
    validation: Source,
    images: Images | Sequence[tuple[np.ndarray, np.ndarray] | Unreadable],
    lines: Sequence[str] = (),
    most: int = 15,
) -> None:
    """Print how many images of which class there are, and draw some as ``out/examples.png``.

    Parameters
    ----------
    out : path
    names : sequence of str
        Names of the classes.
    train, validation : batches.Source
    images : Images or sequence
        Training examples, as the network sees them.
    lines : sequence of str
        What else to print.
    most : int
        Number of lines to print, if there is not more to say than that.
    """
    lines = [f"{len(train)} images to train with, {len(validation)} to validate with", *lines]
    for source, what in ((train, "train"), (validation, "validate")):
        if isinstance(source, ImageList) and source.repeated:
            lines.append(f"{source.repeated} images to {what} with are listed again")

    def picture(i: int) -> np.ndarray:
        example = images[i]
        if isinstance(example, Unreadable):
            return np.full((example.size, example.size), 255, np.uint8)
        return example[0].transpose(1, 2, 0)

    if not isinstance(images, Images):
        print(*lines, sep="\n", flush=True)
        readable = [i for i, example in enumerate(images) if not isinstance(example, Unreadable)]
        titles = [f"{images[i][1]} {shown(names[images[i][1]])}" for i in readable]
        draw_examples(Path(out, "examples.png"), list(map(picture, readable)), titles)
        return
    labels = {"train": train.labels}
    if isinstance(validation, ImageList):
        labels["validate"] = validation.labels
        if shared := train.count_shared(validation, images.root):
            lines.append(f"{shared} images are listed both to train and to validate with")
    absent = np.setdiff1d(np.arange(len(names)), train.labels)
    if absent.tolist() == [0]:
        lines.append("the labels begin at 1: class 0 has no image")
    elif len(absent):
        first = f"{absent[0]} {shown(names[absent[0]])}"
        lines.append(f"{len(absent)} of {len(names)} classes have no image, such as {first}")
    unseen = np.setdiff1d(train.labels, labels.get("validate", train.labels))
    if len(unseen):
        first = f"{unseen[0]} {shown(names[unseen[0]])}"
        lines.append(f"{len(unseen)} classes have no image to validate with, such as {first}")
    if len(absent) == len(names) - 1:
        lines.append("all images are of one class, so every answer will be right")
    print(*lines, sep="\n", flush=True)
    show_classes(out, names, labels, picture, max(3, most - len(lines)))


def save_description(out: str, about: dict[str, Any]) -> None:
    """Write what users of a network need to know beside its weights."""
    with atomic_write(Path(out, "model.json")) as file:
        file.write(json.dumps(about) + "\n")


def print_evaluation(found: dict[str, float]) -> None:
    """Print how good the evaluated network is."""
    accuracy, top5 = found[ACCURACY], found["validation/main/top5"]
    print(f"{accuracy:.2%} of the validation images recognized, {top5:.2%} among the best five")


def print_summary(trainer: chainer.training.Trainer, skipped: int) -> None:
    """Print how good the network is, and where its files are."""
    last, best = trainer.get_extension("LogReport").log[-1], trainer.get_extension("BestModel")
    epoch = last["epoch"]
    plural = "epoch" if epoch == 1 else "epochs"
    print(f"{last[ACCURACY]:.2%} of the validation images recognized after {epoch} {plural}")
    print(f"the best: {best.value:.2%} after epoch {best.epoch}")
    if skipped:
        print(f"images skipped, as they could not be read: {skipped}")
    files = "accuracy.png,loss.png,confusion.png,examples.png,log,best.npz,model.npz"
    print(f"curves, log and networks: {Path(trainer.out).resolve()}/{{{files}}}")
