"""Data sets in MNIST's format, IDX, as PNG files."""

from pathlib import Path

import numpy as np
from PIL import Image

from chainermn.datasets import idx
from chainermn.progress import Progress
from layouts import DataSet


def is_in(folder: Path) -> bool:
    """Tell whether a folder has such a data set."""
    return idx.is_in(folder)


def write_images(folder: Path, out: Path, rank: int, size: int) -> DataSet:
    """Write the images as ``out/PART/CLASS/NUMBER.png``, each rank its share of them.

    Parameters
    ----------
    folder : path
        Folder with four files, named like those of MNIST and Fashion-MNIST, gzipped or not.
    out : path
    rank, size : int
        Number of this rank, and number of ranks.

    Returns
    -------
    DataSet
        All images, on each rank. Classes are the labels of the training images, in order.

    Raises
    ------
    OSError, ValueError
        If a file is missing or damaged, or cannot be written, or if training images lack a class.
    """
    parts = dict(zip(("train", "val"), idx.read_data_set(folder), strict=True))
    classes = np.unique(parts["train"][1])
    unknown = np.setdiff1d(parts["val"][1], classes)
    if len(unknown):
        path = idx.find(folder, "t10k-labels-idx1-ubyte")
        labels = ", ".join(map(str, unknown[:5])) + ", ..." * (len(unknown) > 5)
        raise ValueError(f"{path}: expected labels of the training images, got {labels} too")
    listed = {}
    for part, (pixels, labels) in parts.items():
        listed[part] = [
            (out / part / str(classes[number]) / f"{i:05}.png", number)
            for i, number in enumerate(np.searchsorted(classes, labels).tolist())
        ]
        for label in np.unique(labels):
            (out / part / str(label)).mkdir(parents=True, exist_ok=True)
        mine = range(rank, len(pixels), size)
        show = Progress(len(mine), f"{part}: PNG files") if rank == 0 else None
        for i in mine:
            Image.fromarray(pixels[i]).save(listed[part][i][0])
            if show:
                show.step()
    return DataSet(out, [str(label) for label in classes], **listed)
