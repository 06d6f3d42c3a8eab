"""CIFAR-10 and CIFAR-100 in the formats that people have: binary, Python's, and image files."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from chainer_compat import pickles
from chainermn.datasets import pictures
from chainermn.datasets.folders import (
    Found,
    check_classes,
    find_classes,
    find_files,
    find_folders,
    is_hidden,
)
from chainermn.datasets.names import check_labels, parse_names, shown
from chainermn.files import open_tar, open_unpacked, read_bytes
from chainermn.progress import Progress

SIDE = 32
PIXELS = 3 * SIDE * SIDE
MOST_BYTES = 1 << 28  # of a file, or of all in an archive; CIFAR has 185 million
MOST_CLASSES = 256  # a class is a byte

Labeled = tuple[np.ndarray, np.ndarray]  # images, uint8 of shape (n, 3, 32, 32), and labels (n,)
Parts = tuple[Labeled, Labeled, list[str]]  # to train on, to test with, names of the classes
Files = Mapping[str, Callable[[], bytes]]  # by name, functions that read the content


def read(dataset: str, path: Path) -> Parts:
    """Return images to train on and to test with, and the names of the classes.

    Parameters
    ----------
    dataset : {'cifar10', 'cifar100'}
    path : path
        Folder or ``.tar.gz`` with the binary or the Python version, or folder with
        ``train/CLASS/*.png`` and ``test/CLASS/*.png``. One that has such a folder will do.

    Raises
    ------
    OSError
        If a file is missing.
    ValueError
        If a file is damaged or of another format, or if there are several data sets.
    """
    found: dict[str, Callable[[], Parts]] = {}
    for place, files in files_of(path).items():
        for version in VERSIONS[dataset]:
            if not files.keys().isdisjoint(version.train):
                found[f"{version.test} in {place}"] = partial(read_version, version, place, files)
        if all(place.joinpath(part).is_dir() for part in ("train", "test")):
            found[f"folders in {place}"] = partial(read_folders, place, MOST_FOLDERS[dataset])
    if not found:
        names = ", ".join(version.train[0] for version in VERSIONS[dataset])
        unpack_it = "" if path.is_dir() else "; unpack it if it has folders of images"
        raise FileNotFoundError(
            f"{shown(path.resolve())} contains none of {names}, train/CLASS/*.png of {dataset}"
            f"{unpack_it}"
        )
    if len(found) > 1:
        several = " and ".join(map(shown, found))
        raise ValueError(f"{shown(path)}: expected one data set, got {several}: pass only one")
    return next(iter(found.values()))()


# The binary version, and Python's


def binary_rows(n_labels: int, content: bytes, source: str) -> Labeled:
    """Decode rows of ``n_labels`` bytes, the last of which is the label, and the pixels."""
    row = n_labels + PIXELS
    if not content or len(content) % row:
        raise ValueError(
            f"{source}: expected rows of {row} bytes, {n_labels} for the class and {PIXELS} for "
            f"an image, got {len(content)} bytes: it is damaged, or of another data set"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    return rows[:, n_labels:].reshape(-1, 3, SIDE, SIDE), rows[:, n_labels - 1]


def binary_names(content: bytes, source: str) -> list[str]:
    """Return the lines of a text file, whose last ones may be empty, as in CIFAR-10's."""
    return parse_names(content.rstrip(b"\r\n") + b"\n", source, MOST_CLASSES)


def python_rows(key: str, content: bytes, source: str) -> Labeled:
    """Decode a dictionary with the pixels as ``data``, and the labels."""
    with described(source, f"data and {key}"):
        fields = fields_of(content)
        labels, pixels = fields[key], pickles.array(fields["data"])
        if not isinstance(labels, list):
            labels = pickles.array(labels).tolist()
        if {type(label) for label in labels} != {int}:
            raise ValueError(f"expected integers as {key}")
        if (pixels.shape, pixels.dtype) != ((len(labels), PIXELS), np.uint8):
            raise ValueError(
                f"expected {PIXELS} bytes for each of {len(labels)} labels, got {pixels.dtype} "
                f"of shape {pixels.shape}"
            )
        labels = np.array(labels, np.int64)
    return pixels.reshape(-1, 3, SIDE, SIDE), labels


def python_names(key: str, content: bytes, source: str) -> list[str]:
    """Decode a dictionary with the names of the classes."""
    with described(source, key):
        names = [text(name) for name in fields_of(content)[key]]
        if not names or not all(map(str.strip, names)):
            raise ValueError(f"expected names as {key}, got {names[:5]}")
    return names


def fields_of(content: bytes) -> dict[str, Any]:
    """Return the dictionary in a pickle, without running it."""
    found = pickles.mapping(pickles.read(content))
    return {text(key): value for key, value in found.items()}


def text(found: object) -> str:
    """Return a string of a pickle, which may hold bytes instead."""
    return found if isinstance(found, str) else os.fsdecode(pickles.content(found))


@contextlib.contextmanager
def described(source: str, keys: str) -> Iterator[None]:
    """Name the file in errors; a pickle can be damaged in many ways."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{source}: expected a pickle of a dictionary with {keys}, as of the Python version "
            f"of CIFAR ({type(error).__name__}: {error})"
        ) from None


@dataclass(frozen=True)
class Version:
    """Names of files, and functions from content and path that decode them."""

    train: tuple[str, ...]
    test: str
    classes: str
    decode: Callable[[bytes, str], Labeled]
    decode_names: Callable[[bytes, str], list[str]]


BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))
VERSIONS = {
    "cifar10": [
        Version(
            tuple(f"{name}.bin" for name in BATCHES),
            "test_batch.bin",
            "batches.meta.txt",
            partial(binary_rows, 1),
            binary_names,
        ),
        Version(
            BATCHES,
            "test_batch",
            "batches.meta",
            partial(python_rows, "labels"),
            partial(python_names, "label_names"),
        ),
    ],
    "cifar100": [
        Version(
            ("train.bin",),
            "test.bin",
            "fine_label_names.txt",
            partial(binary_rows, 2),
            binary_names,
        ),
        Version(
            ("train",),
            "test",
            "meta",
            partial(python_rows, "fine_labels"),
            partial(python_names, "fine_label_names"),
        ),
    ],
}


def read_version(version: Version, place: Path, files: Files) -> Parts:
    """Read the files of a version."""

    def content(name: str) -> tuple[bytes, str]:
        if name not in files:
            raise FileNotFoundError(f"{shown(place.resolve())} contains no {name}")
        return files[name](), shown(place / name)

    classes = version.decode_names(*content(version.classes))
    parts = []
    for name in (*version.train, version.test):
        parts.append(version.decode(*content(name)))
        check_labels(parts[-1][1], classes, shown(place / name))
    *train, test = parts
    images, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    check_labels(labels, classes, shown(place), several=True)
    return (images, labels), test, classes


def files_of(path: Path) -> dict[Path, Files]:
    """Return the files in a folder or an archive, and in the folders in it."""
    if not path.is_dir():
        return unpack(path)
    return {
        place: {
            file.name: partial(read_bytes, file, MOST_BYTES)
            for file in place.iterdir()
            if not file.is_dir()
        }
        for place in (path, *(path / name for name in find_folders(path)))
    }


def unpack(path: Path) -> dict[Path, Files]:
    """Return the files in an archive by their folders, whose paths begin with the archive's."""
    found: dict[Path, dict[str, Callable[[], bytes]]] = {}
    try:
        # tarfile by itself ignores the checksum of the archive.
        with open_unpacked(path) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than formats.MOST_BYTES = {MOST_BYTES} bytes in it")
        with open_tar(io.BytesIO(content)) as archive:
            for member in archive:
                inner = path / member.name
                hidden = any(map(is_hidden, Path(member.name).parts))
                # A sparse one can have more bytes than the archive.
                if member.isfile() and not member.issparse() and not hidden:
                    unpacked = archive.extractfile(member).read()
                    found.setdefault(inner.parent, {})[inner.name] = partial(bytes, unpacked)
    except FileNotFoundError:
        raise
    except Exception as error:  # gzip, zlib and tarfile raise all kinds of exceptions
        remedy = "unpack archives of other kinds"
        raise ValueError(f"{shown(path)}: damaged, or no .tar.gz ({error}): {remedy}") from None
    return found


# Folders of images

# Around an image; those of CIFAR-100 may have a superclass around the class.
MOST_FOLDERS = {"cifar10": 1, "cifar100": 2}


def read_folders(folder: Path, most_folders: int) -> Parts:
    """Read ``train/CLASS/*`` and ``test/CLASS/*``; training images come in random order.

    Classes are sorted as text, as in torchvision.
    """
    parts = {part: find_files(folder / part, pictures.endings()) for part in ("train", "test")}
    for line in Found.joined(parts.values()).left_out(pictures.hint):
        print(line, flush=True)
    places = {
        part: class_folders(folder / part, most_folders, found.files)
        for part, found in parts.items()
    }
    classes = sorted(places["train"].values())
    for place, name in places["test"].items():
        if name not in classes:
            train = shown(folder / "train")
            raise ValueError(f"{shown(place)}: expected one of the classes in {train}")
    read = {}
    for part, found in parts.items():
        # The first examples are then of all classes.
        files = np.random.RandomState(0).permutation(found.files)
        progress = Progress(len(files), f"reading {part} images")
        images = np.empty((len(files), 3, SIDE, SIDE), np.uint8)
        for pixels, file in zip(images, files, strict=True):
            pixels[...] = read_image(file)
            progress.step()
        numbers = {place: classes.index(name) for place, name in places[part].items()}
        read[part] = images, np.array([numbers[os.path.dirname(file)] for file in files])
    return read["train"], read["test"], classes


def class_folders(part: Path, most_folders: int, files: list[str]) -> dict[str, str]:
    """Return the classes by the folders that have the files, all of them equally deep."""
    if not files:
        raise FileNotFoundError(f"{shown(part)} contains no image")
    names = find_folders(part)
    if most_folders > 1:
        inner = {name: find_folders(part / name) for name in names}
        names = [str(Path(name, below)) for name in names for below in inner[name] or "."]
    found = find_classes(part, names, pictures.endings(), pictures.hint)
    if part.name == "train":
        check_classes(part, found, pictures.hint)
    classes = dict[str, str]()
    for name in names:
        other = classes.setdefault(os.path.basename(name), name)
        if other != name:
            raise ValueError(
                f"{shown(part)}: expected one folder of a class, got {shown(other)} and "
                f"{shown(name)}"
            )
    depth = names[0].count("/") if names else 0
    places = {str(part / path): name for name, path in classes.items() if path.count("/") == depth}
    for file in files:
        if os.path.dirname(file) not in places:
            expected = "train/CLASS/FILE" + " or train/SUPERCLASS/CLASS/FILE" * (most_folders > 1)
            raise ValueError(f"{shown(file)}: expected it in folders as {expected}")
    return places


def read_image(path: str) -> np.ndarray:
    """Read an image of the right size, of shape (3, 32, 32)."""
    with pictures.open_picture(path) as picture:  # whose errors name the file
        if picture.size != (SIDE, SIDE):
            width, height = picture.size
            raise ValueError(
                f"expected {SIDE}x{SIDE} pixels, got {width}x{height}; apps/imagenet takes images "
                "of any size"
            )
        return np.asarray(picture.rgb()).transpose(2, 0, 1)
