"""What a run writes and prints, on rank 0: log, curves and networks."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import chainer
import matplotlib
from chainer.serializers import save_npz
from chainer.training import extensions

from chainermn.extensions import BestModel, TensorBoardReport, TerminalReport, Throughput
from chainermn.files import atomic_write

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
        print(f"images skipped in all epochs, as they could not be read: {skipped}")
    files = "accuracy.png,loss.png,confusion.png,log,best.npz,model.npz"
    print(f"curves, log and networks: {Path(trainer.out).resolve()}/{{{files}}}")
