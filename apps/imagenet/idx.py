"""Data sets in MNIST's format, IDX, as PNG files."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from chainermn.files import open_regular
from chainermn.progress import Progress
from layouts import DataSet

PARTS = {"train": "train", "val": "t10k"}
MOST_BYTES = 1 << 30  # of an array; MNIST's have 47 million
IMAGES, LABELS = "{}-images-idx3-ubyte", "{}-labels-idx1-ubyte"


def is_in(folder: Path) -> bool:
    """Tell whether a folder has such a data set."""
    name = IMAGES.format(PARTS["train"])
    return any((folder / name).exists() for name in (name, f"{name}.gz"))


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
        All images, on each rank. Classes are named by their numbers.

    Raises
    ------
    OSError, ValueError
        If a file is missing or damaged, or cannot be written.
    """
    read = {part: read_part(folder, prefix) for part, prefix in PARTS.items()}
    n_classes = 1 + max(int(labels.max()) for _, labels in read.values())
    listed = {}
    for part, (pixels, labels) in read.items():
        listed[part] = [
            (out / part / str(label) / f"{i:05}.png", label)
            for i, label in enumerate(labels.tolist())
        ]
        for label in range(n_classes):
            (out / part / str(label)).mkdir(parents=True, exist_ok=True)
        mine = range(rank, len(pixels), size)
        show = Progress(len(mine), f"{part}: PNG files") if rank == 0 else None
        for i in mine:
            Image.fromarray(pixels[i]).save(listed[part][i][0])
            if show:
                show.step()
    return DataSet(out, [str(label) for label in range(n_classes)], **listed)


def read_part(folder: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 of shape (images, height, width), and labels, of shape (images,)."""
    pixels = read_array(folder, IMAGES.format(prefix), 3)
    labels = read_array(folder, LABELS.format(prefix), 1)
    if len(pixels) != len(labels) or not len(labels):
        raise ValueError(f"{folder}: {prefix} has {len(pixels)} images and {len(labels)} labels")
    return pixels, labels


def read_array(folder: Path, name: str, ndim: int) -> np.ndarray:
    """Read a file of unsigned bytes with ``ndim`` dimensions, which may be gzipped."""
    path = folder / name
    if not path.exists() and not (path := folder / f"{name}.gz").exists():
        raise FileNotFoundError(f"{folder} contains neither {name} nor {name}.gz")
    try:
        with open_regular(path) as packed:
            file = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
            header = file.read(4 * (1 + ndim)).ljust(4 * (1 + ndim), b"\0")
            magic, *shape = np.frombuffer(header, ">u4").tolist()
            size = math.prod(shape)
            if magic == 0x800 + ndim and size > MOST_BYTES:
                expected = f"at most idx.MOST_BYTES = {MOST_BYTES} bytes"
                raise ValueError(f"{path}: expected {expected}, got an array of {size}")
            # A limit, because a small file can unpack to gigabytes.
            content = file.read(size + 1) if magic == 0x800 + ndim else b""
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    if magic != 0x800 + ndim:
        expected = f"an IDX file of unsigned bytes with {ndim} dimensions"
        raise ValueError(f"{path}: expected {expected}, got something else")
    if len(content) != size:
        found = "more" if len(content) > size else len(content)
        expected = f"{size} bytes for an array of shape {tuple(shape)}"
        raise ValueError(f"{path}: expected {expected}, got {found}")
    return np.frombuffer(content, np.uint8).reshape(shape)
