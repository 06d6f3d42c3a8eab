"""What a run writes and prints: log, pictures, curves and generators."""

import argparse
import math
from pathlib import Path

import chainer
import numpy as np
from chainer.training import extensions
from matplotlib.figure import Figure
from PIL import Image

from chainermn.datasets.overview import choose_examples, draw_examples
from chainermn.extensions import BestModel, TensorBoardReport, TerminalReport, Throughput
from evaluation import DISTANCE
from model import N_LATENT, Generator, generate

LOSSES = ["generator/loss", "discriminator/loss"]
N_SHOWN = 80
FEWEST_PIXELS = 300  # a side of a picture; smaller ones are enlarged


def show_examples(images: np.ndarray, n_validation: int, out: str) -> None:
    """Print how many images there are, and draw some; they are of shape (n, channels, y, x)."""
    channels, height, width = images.shape[1:]
    kind = f"{height}x{width} pixels, {'color' if channels == 3 else 'gray'}"
    print(f"{len(images)} images to train on, {n_validation} to compare with: {kind}", flush=True)
    chosen = choose_examples(np.zeros(len(images)))
    pictures = [np.squeeze(images[i].transpose(1, 2, 0)) for i in chosen]
    draw_examples(Path(out, "examples.png"), pictures, [f"image {i}" for i in chosen])


def add_reports(
    trainer: chainer.training.Trainer,
    generator: Generator,
    args: argparse.Namespace,
    n_ranks: int,
) -> None:
    """Extend the trainer, on rank 0 alone, after the evaluator."""
    trainer.extend(BestModel(generator, DISTANCE, mode="min"))
    trainer.extend(extensions.snapshot_object(generator, "model.npz"))
    trainer.extend(Pictures(generator, args.seed))
    trainer.extend(Throughput("images", args.batchsize, n_ranks))
    trainer.extend(extensions.LogReport())
    if args.tensorboard:
        trainer.extend(TensorBoardReport())
    trainer.extend(TerminalReport(["epoch", *LOSSES, DISTANCE, "images/s", "elapsed_time"]))


class Pictures(chainer.training.Extension):
    """Draws the same latents after each epoch.

    Parameters
    ----------
    generator : Generator
    seed : int
        Seed of the random numbers.
    """

    trigger = 1, "epoch"

    def __init__(self, generator: Generator, seed: int) -> None:
        latents = np.random.RandomState(seed).standard_normal((N_SHOWN, N_LATENT))
        self.generator = generator
        self.latents = generator.xp.asarray(latents)

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Write ``pictures/epoch_N.png``."""
        folder = Path(trainer.out, "pictures")
        folder.mkdir(exist_ok=True)
        images = generate(self.generator, self.latents)
        save_grid(images, folder / f"epoch_{trainer.updater.epoch:03d}.png")


def save_grid(images: np.ndarray, path: Path) -> None:
    """Draw images in a grid.

    Parameters
    ----------
    images : array of uint8, shape (n, channels, size, size)
    path : Path
        PNG file to write.
    """
    n, channels, size, _ = images.shape
    columns = math.ceil(math.sqrt(1.25 * n))
    rows = math.ceil(n / columns)
    gap = max(1, size // 16)
    grid = np.zeros((rows * columns, channels, size + gap, size + gap), np.uint8)
    grid[:n, :, :size, :size] = images
    grid = grid.reshape(rows, columns, *grid.shape[1:]).transpose(0, 3, 1, 4, 2)
    grid = grid.reshape(rows * (size + gap), columns * (size + gap), channels)
    picture = Image.fromarray(grid[:-gap, :-gap, 0] if channels == 1 else grid[:-gap, :-gap])
    times = math.ceil(FEWEST_PIXELS / picture.height)
    shape = times * picture.width, times * picture.height
    picture.resize(shape, Image.Resampling.NEAREST).save(path)


def draw_curves(log: list[dict[str, float]], distances: dict[str, float], path: Path) -> None:
    """Draw losses and distance, epoch by epoch, with reference distances."""
    figure = Figure(figsize=(7, 6), layout="constrained", dpi=100)
    of_distance, of_losses = figure.subplots(2, sharex=True)
    epochs = [row["epoch"] for row in log]
    of_distance.semilogy(epochs, [row[DISTANCE] for row in log], label="generated images")
    for (name, value), style in zip(distances.items(), ("--", ":"), strict=True):
        of_distance.axhline(value, color="gray", linestyle=style, label=name)
    of_distance.set_ylabel("distance from validation images")
    for key in LOSSES:
        of_losses.plot(epochs, [row[key] for row in log], label=key.partition("/")[0])
    of_losses.set_ylabel("loss")
    of_losses.set_xlabel("epoch")
    for axes in (of_distance, of_losses):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path)


def finish(trainer: chainer.training.Trainer, distances: dict[str, float]) -> None:
    """Draw the curves, and print how good the generator is and where the files are."""
    out = Path(trainer.out)
    log, best = trainer.get_extension("LogReport").log, trainer.get_extension("BestModel")
    draw_curves(log, distances, out / "curves.png")
    epoch = log[-1]["epoch"]
    print(f"distance {log[-1][DISTANCE]:.3f} after {epoch} epoch{'s' * (epoch != 1)}")
    print(f"the best: {best.value:.3f} after epoch {best.epoch}")
    files = f"pictures/epoch_{epoch:03d}.png,curves.png,log,best.npz,model.npz"
    print(f"pictures, curves, log and generators: {out.resolve()}/{{{files}}}")
