"""Training images of one size, without labels."""

import zlib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from PIL import Image, ImageOps

from chainermn.datasets import idx, pictures
from chainermn.datasets.folders import find_files
from chainermn.datasets.names import shown
from chainermn.progress import Progress

HELD_OUT = 0.1  # share of the files in a folder
FEWEST_FILES = 100


def load(dataset: str, directory: str | None, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the training images, and images to compare generated ones with.

    Parameters
    ----------
    dataset : {'digits', 'mnist', 'images'}
        ``digits`` comes with scikit-learn: 1437 and 360 images of 8x8 pixels. ``mnist`` is read
        from two IDX files of MNIST or of a set like it. ``images`` are image files in a folder and
        below it; one in ten is held out.
    directory : path or None
        Folder of ``mnist`` or ``images``.
    size : int
        Height and width to which ``images`` are scaled, after cropping each to its middle.

    Returns
    -------
    train, validation : array of uint8, shape (n, channels, size, size)

    Raises
    ------
    OSError, ValueError
        If the folder lacks a file, a file is not what its name says, there are too few images, or
        a folder is missing, or given where none is needed.
    """
    if (dataset == "digits") == bool(directory):
        expected = "takes no folder" if dataset == "digits" else "needs a folder"
        raise ValueError(f"--dataset {dataset} {expected}; got --data {directory}")
    if dataset == "digits":
        return _load_digits()
    if dataset == "mnist":
        train, validation = idx.read_images(directory)
        if train.shape[1] != train.shape[2]:
            size = "x".join(map(str, train.shape[1:]))
            raise ValueError(f"{shown(directory)}: expected square images, got {size} pixels")
        return train[:, None], validation[:, None]
    return _load_files(Path(directory), size)


@chainer.dataset.converter()
def to_pixels(images: list[np.ndarray], device: chainer.backend.Device) -> Any:
    """Return a batch for the networks: from -1 for black to 1 for white, on a device."""
    dtype = chainer.get_dtype(map_mixed16=np.float16)
    return device.send(np.stack(images).astype(dtype) / 127.5 - 1)


def digest(images: np.ndarray) -> str:
    """Return a digest of images."""
    return f"{zlib.crc32(images):08x}"


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    # Like sklearn.datasets.load_digits, without the half second that its import takes.
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    pixels = np.loadtxt(path, delimiter=",")[:, :-1].reshape(-1, 8, 8)
    order = np.random.RandomState(0).permutation(len(pixels))
    images = np.rint(pixels[order, None] * (255 / 16)).astype(np.uint8)
    return images[:1437], images[1437:]


def _load_files(directory: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    found = find_files(directory, pictures.endings())
    paths, left_out = found.files, found.left_out(pictures.hint)
    if len(paths) < FEWEST_FILES:
        raise ValueError(
            f"expected at least {FEWEST_FILES} image files in {shown(directory.resolve())} and "
            f"its folders, got {'; '.join([str(len(paths)), *left_out])}"
        )
    print("\n".join([f"{len(paths)} images in {shown(directory)}", *left_out]), flush=True)
    images = np.empty((len(paths), 3, size, size), np.uint8)
    progress = Progress(len(paths), "reading images")
    for pixels, path in zip(images, paths, strict=True):
        with pictures.open_picture(path) as picture:
            fitted = ImageOps.fit(picture.rgb(), (size, size), Image.Resampling.BICUBIC)
        pixels[...] = np.asarray(fitted).transpose(2, 0, 1)
        progress.step()
    images = images[np.random.RandomState(0).permutation(len(images))]
    n_held_out = round(HELD_OUT * len(images))
    return images[n_held_out:], images[:n_held_out]
