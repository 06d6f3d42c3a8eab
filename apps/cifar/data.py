"""Small color images with classes."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from chainer.datasets import TransformDataset, TupleDataset

import formats
import shapes
from chainermn.files import read_json
from formats import SIDE

DATASETS = ("shapes", "cifar10", "cifar100")
# Largest offset of a random crop.
PADDING = 4
TEST_SHAPES = 1000


@dataclass(frozen=True)
class Images:
    """Pairs of an image, uint8 of shape (3, 32, 32), and its class, int32.

    Attributes
    ----------
    train, validation : chainer.datasets.TupleDataset
        Nine tenths and one tenth of the images to train on, divided at random.
    test : chainer.datasets.TupleDataset
        Images that neither training nor the choice of hyperparameters uses.
    classes : list of str
        Names of the classes.
    digest : str
        Digest of the images to train on and validate with, and of their labels.
    """

    train: TupleDataset
    validation: TupleDataset
    test: TupleDataset
    classes: list[str]
    digest: str

    def settings(self) -> dict[str, Any]:
        """Return what a run must not change when it is resumed."""
        return {"classes": self.classes, "images": self.digest}

    def check_classes(self, record: Path) -> None:
        """Raise ValueError if the run that wrote a ``run.json`` had other classes.

        Older records do not say which; a missing one does not, either.
        """
        if record.exists():
            trained = read_json(record, {"arguments": dict})["arguments"]
            if (classes := trained.get("classes", self.classes)) != self.classes:
                raise ValueError(
                    f"{record}: the network was trained with the classes {classes!a:.300}, but "
                    f"--data has {self.classes!a:.300}"
                )


def load(dataset: str, path: str | None = None, examples: int | None = None) -> Images:
    """Return training, validation and test images.

    Parameters
    ----------
    dataset : {'shapes', 'cifar10', 'cifar100'}
        ``shapes`` are drawn here; the others are read.
    path : path, optional
        CIFAR in one of the formats that `formats.read` takes.
    examples : int, optional
        Number of images to train on and validate with: by default 5000 shapes, or all of CIFAR.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If a file is damaged or of another format, or arguments do not fit.
    """
    if (dataset == "shapes") == bool(path):
        wanted = "is drawn, so it takes no --data" if path else "is read from --data PATH"
        raise ValueError(f"--dataset {dataset} {wanted}")
    if not path:
        train, test = shapes.draw(examples or 5000, seed=1), shapes.draw(TEST_SHAPES, seed=2)
        return _divided(train, test, shapes.CLASSES)
    (images, labels), test, classes = formats.read(dataset, Path(path))
    return _divided((images[:examples], labels[:examples]), test, classes)


def normalized(dataset: TupleDataset, augment: bool = False) -> TransformDataset:
    """Return a data set for a network: images of ``chainer.config.dtype``, from -1 to 1.

    With ``augment``, each access mirrors the image or not, and crops it from one with a black
    frame of 4 pixels, as NumPy's global random generator decides.
    """

    def transform(example: tuple[np.ndarray, np.int32]) -> tuple[np.ndarray, np.int32]:
        image, label = example
        if augment:
            image = _cut_out(image)
        dtype = chainer.get_dtype(map_mixed16=np.float16)
        return image.astype(dtype) / 127.5 - 1, label

    return TransformDataset(dataset, transform)


def _cut_out(image: np.ndarray) -> np.ndarray:
    top, left = np.random.randint(0, 2 * PADDING + 1, 2)
    padded = np.pad(image, ((0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    cut = padded[:, top : top + SIDE, left : left + SIDE]
    return cut[:, :, ::-1] if np.random.randint(2) else cut


def _divided(
    images: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], classes: list[str]
) -> Images:
    (x, y), (test_x, test_y) = images, test
    y = y.astype(np.int32)
    if len(x) < 10:
        raise ValueError(f"--examples must be at least 10, got {len(x)}")
    order = np.random.RandomState(0).permutation(len(x))
    validation, train = np.split(order, [len(x) // 10])
    return Images(
        TupleDataset(x[train], y[train]),
        TupleDataset(x[validation], y[validation]),
        TupleDataset(test_x, test_y.astype(np.int32)),
        classes,
        f"{zlib.crc32(y, zlib.crc32(np.ascontiguousarray(x))):08x}",
    )
