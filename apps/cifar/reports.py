"""What a run writes and prints, on rank 0: log, curves and networks."""

import argparse
from pathlib import Path

import chainer
import matplotlib
from chainer.training import extensions

from chainermn.datasets.overview import show_classes
from chainermn.extensions import BestModel, TensorBoardReport, TerminalReport, Throughput
from data import Images
from training import ACCURACY, LOSS


def show_data(images: Images, out: str) -> None:
    """Print how many images each class has, and draw some of them."""
    parts = {"train": images.train, "validate": images.validation, "test": images.test}
    labels = {name: [label for _, label in part] for name, part in parts.items()}
    show_classes(out, images.classes, labels, lambda i: images.train[i][0].transpose(1, 2, 0))


def add_reports(
    trainer: chainer.training.Trainer,
    network: chainer.Link,
    args: argparse.Namespace,
    n_ranks: int,
) -> None:
    """Extend the trainer, after the evaluator."""
    trainer.extend(BestModel(network, ACCURACY))
    trainer.extend(extensions.snapshot_object(network, "model.npz"), trigger=(1, "epoch"))
    trainer.extend(extensions.observe_lr(), trigger=(1, "epoch"))
    trainer.extend(Throughput("images", args.batchsize, n_ranks))
    trainer.extend(extensions.LogReport())
    if args.tensorboard:
        trainer.extend(TensorBoardReport())

    matplotlib.use("Agg")  # draws into files, even without a screen
    for curves in (["main/loss", LOSS], ["main/accuracy", ACCURACY]):
        filename = f"{curves[0].removeprefix('main/')}.png"
        trainer.extend(extensions.PlotReport(curves, "epoch", filename=filename))
    columns = ["epoch", "main/loss", LOSS, "main/accuracy", ACCURACY, "images/s", "minutes left"]
    trainer.extend(TerminalReport(columns))


def print_summary(trainer: chainer.training.Trainer) -> None:
    """Print how good the network is, and where its files are."""
    last, best = trainer.get_extension("LogReport").log[-1], trainer.get_extension("BestModel")
    epoch = last["epoch"]
    plural = "epoch" if epoch == 1 else "epochs"
    print(f"{last[ACCURACY]:.2%} of the validation images recognized after {epoch} {plural}")
    print(f"the best: {best.value:.2%} after epoch {best.epoch}")
    files = "accuracy.png,loss.png,log,best.npz,model.npz"
    print(f"curves, log and networks: {Path(trainer.out).resolve()}/{{{files}}}")
