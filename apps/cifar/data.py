"""Small color images with classes."""

import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import chainer
import numpy as np
from chainer.datasets import TransformDataset, TupleDataset

import shapes
from chainermn.files import open_regular, open_tar, read_bytes

SIDE = 32
PIXELS = 3 * SIDE * SIDE
DATASETS = ("shapes", "cifar10", "cifar100")
MOST_BYTES = 1 << 28  # of a file, or of all in an archive; CIFAR has 185 million
# Largest offset of a random crop.
PADDING = 4
TEST_SHAPES = 1000


@dataclass(frozen=True)
class BinaryFiles:
    """Files of the binary version of CIFAR. A row has the labels, one byte each, then the pixels.

    If there are several labels, the last one counts.
    """

    train: tuple[str, ...]
    test: str
    classes: str
    n_labels: int


FILES = {
    "cifar10": BinaryFiles(
        tuple(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin", "batches.meta.txt", 1
    ),
    "cifar100": BinaryFiles(("train.bin",), "test.bin", "fine_label_names.txt", 2),
}


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
    """

    train: TupleDataset
    validation: TupleDataset
    test: TupleDataset
    classes: list[str]


def load(dataset: str, path: str | None = None, examples: int | None = None) -> Images:
    """Return training, validation and test images.

    Parameters
    ----------
    dataset : {'shapes', 'cifar10', 'cifar100'}
        ``shapes`` are drawn here; the others are read.
    path : path, optional
        Folder, or ``.tar.gz``, with the files of the binary version of CIFAR.
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
    files, read = FILES[dataset], _reader(Path(path))
    classes = _class_names(read(files.classes), files.classes)
    parts = [decode(read(name), files.n_labels, len(classes), name) for name in files.train]
    images, labels = (np.concatenate(arrays)[:examples] for arrays in zip(*parts, strict=True))
    test = decode(read(files.test), files.n_labels, len(classes), files.test)
    return _divided((images, labels), test, classes)


def _class_names(content: bytes, name: str) -> list[str]:
    try:
        classes = content.decode().split()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected UTF-8 ({error})") from None
    if not 1 <= len(classes) <= 256:  # a class is a byte
        raise ValueError(f"{name}: expected 1 to 256 names, got {len(classes)}")
    return classes


def decode(
    content: bytes, n_labels: int, n_classes: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Decode a file of the binary version of CIFAR.

    Parameters
    ----------
    content : bytes
        Content of the whole file.
    n_labels : int
        Number of labels per image; the last one is returned.
    n_classes : int
    name : str
        Name of the file for error messages.

    Returns
    -------
    images : array of uint8, shape (n, 3, 32, 32)
    labels : array of int32, shape (n,)

    Raises
    ------
    ValueError
        If it has another format, or is truncated.
    """
    row = n_labels + PIXELS
    if not content or len(content) % row:
        raise ValueError(
            f"{name}: expected rows of {row} bytes, {n_labels} for the class and {PIXELS} for an "
            f"image, got {len(content)} bytes: it is damaged, or of another data set"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    labels = rows[:, n_labels - 1].astype(np.int32)
    if labels.max() >= n_classes:
        raise ValueError(
            f"{name}: expected classes from 0 to {n_classes - 1}, got {labels.max()}: it is "
            "damaged, or of another data set"
        )
    return rows[:, n_labels:].reshape(-1, 3, SIDE, SIDE), labels


def normalized(dataset: TupleDataset, augment: bool = False) -> TransformDataset:
    """Return a data set for a network: images of ``chainer.config.dtype``, from -1 to 1.

    With ``augment``, each access mirrors the image or not, and crops it from one with a black
    frame of 4 pixels, as NumPy's global random generator decides.
    """

    def transform(example: tuple[np.ndarray, np.int32]) -> tuple[np.ndarray, np.int32]:
        image, label = example
        if augment:
            image = _cut_out(image)
        return image.astype(chainer.get_dtype()) / 127.5 - 1, label

    return TransformDataset(dataset, transform)


def _cut_out(image: np.ndarray) -> np.ndarray:
    top, left = np.random.randint(0, 2 * PADDING + 1, 2)
    padded = np.pad(image, ((0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    cut = padded[:, top : top + SIDE, left : left + SIDE]
    return cut[:, :, ::-1] if np.random.randint(2) else cut


def _divided(
    images: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], classes: list[str]
) -> Images:
    x, y = images
    if len(x) < 10:
        raise ValueError(f"--examples must be at least 10, got {len(x)}")
    order = np.random.RandomState(0).permutation(len(x))
    validation, train = np.split(order, [len(x) // 10])
    return Images(
        TupleDataset(x[train], y[train]),
        TupleDataset(x[validation], y[validation]),
        TupleDataset(*test),
        classes,
    )


def _reader(path: Path) -> Callable[[str], bytes]:
    """Return a function that reads a file, by name, from a folder or archive.

    The function raises FileNotFoundError if there is no such file.
    """
    if path.is_dir():
        contents = {file.name: partial(read_bytes, file, MOST_BYTES) for file in path.iterdir()}
    else:
        contents = {name: (lambda content=content: content) for name, content in _unpack(path)}

    def read(name: str) -> bytes:
        if name in contents:
            return contents[name]()
        found = f"{path.resolve()} contains no {name}"
        if name.removesuffix(".bin") in contents:
            found += (
                ", but the Python version of CIFAR. Its files are pickles, which can run any "
                "program when they are read: fetch the binary version"
            )
        raise FileNotFoundError(found)

    return read


def _unpack(path: Path) -> list[tuple[str, bytes]]:
    try:
        # tarfile by itself ignores the checksum of the archive.
        with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than data.MOST_BYTES = {MOST_BYTES} bytes in it")
        with open_tar(io.BytesIO(content)) as archive:
            return [
                (PurePosixPath(member.name).name, archive.extractfile(member).read())
                for member in archive
                # A sparse one can have more bytes than the archive.
                if member.isfile() and not member.issparse()
            ]
    except FileNotFoundError:
        raise
    except Exception as error:  # gzip, zlib and tarfile raise all kinds of exceptions
        raise ValueError(f"{path}: damaged, or no .tar.gz ({error})") from None
