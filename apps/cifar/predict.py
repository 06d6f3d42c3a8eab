#!/usr/bin/env python3
"""Classify the test images with a trained network, and draw them."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chainer
import numpy as np

import data
from chainermn.datasets.names import shown
from chainermn.files import check_trained, exit_on_error, read_bytes, read_json
from model import MOST_BYTES, ResNet, load_weights

N_COLUMNS, N_ROWS = 6, 6
# Arguments of train.py that are used here.
ARGUMENTS = {
    "dataset": set(data.DATASETS),
    "data": str | None,
    "examples": int | None,
    "unit": range(1, 1025),
    "dropout": float,
}
MOST_EXAMPLES = 1_000_000  # are drawn


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    with exit_on_error():
        check_trained(args.weights, __file__, "run.json")
        trained = read_arguments(args.weights)
        sources = trained["dataset"], args.data or trained["data"], trained["examples"]
        images = data.load(*sources)
        images.check_classes(args.weights.with_name("run.json"))
        network = ResNet(trained["unit"], len(images.classes), trained["dropout"])
        load_weights(read_bytes(args.weights, MOST_BYTES), args.weights, network)
    chances = predict(network, data.normalized(images.test))
    labels = np.array([label for _, label in images.test])
    seen = chances.argmax(axis=1)

    wrong = seen != labels
    print(f"{1 - wrong.mean():.2%} of {len(labels)} test images recognized")
    pairs = Counter(zip(labels[wrong].tolist(), seen[wrong].tolist(), strict=True))
    for (label, other), n in pairs.most_common(5):
        names = shown(images.classes[label]), shown(images.classes[other])
        print(f"  {names[0]} taken for {names[1]}: {n} time{'s' * (n > 1)}")
    # Errors first, the most confident first; then correct ones, the least confident first.
    order = np.lexsort([np.where(wrong, -1, 1) * chances.max(axis=1), ~wrong])
    with exit_on_error():
        draw(images, order[: N_COLUMNS * N_ROWS], seen, args.picture)
    print(f"picture: {args.picture.resolve()}")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    best = Path("result/best.npz")
    add("weights", metavar="FILE", nargs="?", type=Path, default=best, help="default: %(default)s")
    add("--data", metavar="PATH", help="CIFAR files; default: those of the training")
    picture = Path("predictions.png")
    add("--picture", metavar="FILE", type=Path, default=picture, help="default: %(default)s")
    return parser.parse_args(argv)


def read_arguments(weights: Path) -> dict[str, Any]:
    """Return the arguments of the training, from the ``run.json`` beside the weights.

    Raises
    ------
    OSError, ValueError
        If it is missing, damaged, or of another form.
    """
    record = weights.with_name("run.json")
    arguments = read_json(record, {"arguments": ARGUMENTS})["arguments"]
    if (arguments["examples"] or 0) > MOST_EXAMPLES:
        raise ValueError(f"{record}: expected at most {MOST_EXAMPLES} examples, got more")
    return arguments


def predict(
    network: chainer.Chain, dataset: chainer.datasets.TransformDataset, batchsize: int = 100
) -> np.ndarray:
    """Return the probability of each class.

    Parameters
    ----------
    network : chainer.Chain
    dataset : data set
        Pairs that `data.normalized` makes.
    batchsize : int

    Returns
    -------
    array of float32, shape (n, classes)
    """
    batches = (dataset[i : i + batchsize] for i in range(0, len(dataset), batchsize))
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        scores = [network(np.stack([image for image, _ in batch])) for batch in batches]
        return chainer.functions.softmax(chainer.functions.concat(scores, axis=0)).array


def draw(images: data.Images, chosen: np.ndarray, seen: np.ndarray, path: Path) -> None:
    """Draw test images, each with the predicted class, and the true class of errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(N_COLUMNS, N_ROWS * 1.25), layout="constrained", dpi=90)
    for place, i in enumerate(chosen, 1):
        image, label = images.test[i]
        axes = figure.add_subplot(N_ROWS, N_COLUMNS, place)
        axes.imshow(image.transpose(1, 2, 0), interpolation="nearest")
        axes.set_axis_off()
        title, color = shown(images.classes[seen[i]]), "black"
        if seen[i] != label:
            title, color = f"{title},\nis {shown(images.classes[label])}", "firebrick"
        axes.set_title(title, color=color, fontsize=8, pad=2, parse_math=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
