#!/usr/bin/env python3
"""Read the validation data with a trained network, and draw digits with its answers."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import chainer
import numpy as np

import data
from chainermn.files import exit_on_error
from model import MODELS, load_weights

N_COLUMNS, N_ROWS = 6, 6  # readable on a phone


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    network = MODELS[args.model](args.unit, len(data.CLASSES))
    with exit_on_error():
        _, validation = data.load(args.dataset, args.data)
        images = np.stack([image for image, _ in validation])
        predict(network, images[:1])  # so that weights for images of another size do not fit
        load_weights(args.weights, network)
    digits = np.array([digit for _, digit in validation])
    shares = predict(network, images)
    read = shares.argmax(axis=1)

    wrong = read != digits
    print(f"{1 - wrong.mean():.2%} of {len(digits)} images read correctly")
    pairs = Counter(zip(digits[wrong].tolist(), read[wrong].tolist(), strict=True))
    for (digit, other), n in pairs.most_common(5):
        print(f"  {digit} read as {other}: {n} time{'s' * (n > 1)}")
    # Errors first, the most confident first; then correct ones, the least confident first.
    order = np.lexsort([np.where(wrong, -1, 1) * shares.max(axis=1), ~wrong])
    shown = order[: N_COLUMNS * N_ROWS]
    with exit_on_error():
        draw(images[shown], digits[shown], read[shown], args.picture)
    print(f"picture: {args.picture.resolve()}")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    best = Path("result/best.npz")
    add("weights", metavar="FILE", nargs="?", type=Path, default=best, help="default: %(default)s")
    add("--dataset", choices=data.DATASETS, default="digits", help="default: %(default)s")
    add("--data", metavar="DIR", help="read MNIST's IDX files from this folder")
    add("--model", "-m", choices=MODELS, default="mlp", help="as in training")
    add("--unit", "-u", type=int, default=200, help="as in training")
    picture = Path("predictions.png")
    add("--picture", metavar="FILE", type=Path, default=picture, help="default: %(default)s")
    return parser.parse_args(argv)


def predict(network: chainer.Chain, images: np.ndarray, batchsize: int = 500) -> np.ndarray:
    """Return the probability of each digit.

    Parameters
    ----------
    network : chainer.Chain
    images : array of float32, shape (n, height, width)
    batchsize : int

    Returns
    -------
    array of float32, shape (n, 10)
    """
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        scores = [
            chainer.functions.softmax(network(images[i : i + batchsize])).array
            for i in range(0, len(images), batchsize)
        ]
    return np.concatenate(scores)


def draw(images: np.ndarray, digits: np.ndarray, read: np.ndarray, path: Path) -> None:
    """Draw images, each with the digit that was read, and the right digit of errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(N_COLUMNS * 0.8, N_ROWS), layout="constrained", dpi=120)
    for place, (image, digit, seen) in enumerate(zip(images, digits, read, strict=True), 1):
        axes = figure.add_subplot(N_ROWS, N_COLUMNS, place)
        axes.imshow(image, cmap="gray_r", vmin=0, vmax=1)
        axes.set_axis_off()
        right = seen == digit
        title, color = (str(seen), "black") if right else (f"{seen}, is {digit}", "firebrick")
        axes.set_title(title, color=color, fontsize=10, pad=2)
    figure.savefig(path)


if __name__ == "__main__":
    main()
