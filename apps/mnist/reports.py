"""What a run writes and prints: log, curves and models."""

import argparse
from pathlib import Path

import chainer
import matplotlib
from chainer.training import extensions

from chainermn.extensions import BestModel, TensorBoardReport, TerminalReport, Throughput

ACCURACY = "validation/main/accuracy"


def add_reports(
    trainer: chainer.training.Trainer,
    network: chainer.Link,
    args: argparse.Namespace,
    n_ranks: int = 1,
) -> None:
    """Extend the trainer, on rank 0 alone, after the evaluator."""
    trainer.extend(BestModel(network, ACCURACY))
    trainer.extend(extensions.snapshot_object(network, "model.npz"))
    trainer.extend(Throughput("images", args.batchsize, n_ranks))
    trainer.extend(extensions.LogReport())
    if args.tensorboard:
        trainer.extend(TensorBoardReport())

    matplotlib.use("Agg")  # draws into files, even without a screen
    for quantity in ("loss", "accuracy"):
        curves = [f"main/{quantity}", f"validation/main/{quantity}"]
        plot = extensions.PlotReport(curves, "epoch", filename=f"{quantity}.png")
        trainer.extend(plot)

    columns = ["epoch", "main/loss", "validation/main/loss"]
    columns += ["main/accuracy", ACCURACY, "elapsed_time"]
    trainer.extend(TerminalReport(columns))


def print_summary(trainer: chainer.training.Trainer) -> None:
    """Print how good the network is, and where its files are."""
    last, best = trainer.get_extension("LogReport").log[-1], trainer.get_extension("BestModel")
    epoch = last["epoch"]
    plural = "epoch" if epoch == 1 else "epochs"
    read = "of the validation data read correctly"
    print(f"{last[ACCURACY]:.2%} {read} after {epoch} {plural}")
    print(f"the best: {best.value:.2%} after epoch {best.epoch}")
    files = "accuracy.png,loss.png,log,best.npz,model.npz"
    print(f"curves, log and networks: {Path(trainer.out).resolve()}/{{{files}}}")
