"""Images with labels in MNIST's format, IDX: four files in a folder."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chainermn.datasets.names import shown
from chainermn.files import open_unpacked

__all__ = ["find", "is_in", "read_data_set", "read_images", "read_part"]

Bytes: TypeAlias = NDArray[np.uint8]
Labeled: TypeAlias = tuple[Bytes, Bytes]

# Of an array; MNIST's largest has 47 million. A small file may unpack to gigabytes.
MOST_BYTES = 1 << 30

_PARTS = "train", "t10k"


def is_in(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder has images to train on in IDX.

    Examples
    --------
    >>> from chainermn.datasets import idx
    >>> idx.is_in(".")
    False
    """
    return bool(_candidates(folder, f"{_PARTS[0]}-images-idx3-ubyte"))


def find(folder: str | os.PathLike[str], name: str) -> Path:
    """Return the path of a file, under whichever name it is there.

    Parameters
    ----------
    folder : path
        Folder to search.
    name : str
        Name of one of MNIST's four files, such as 'train-images-idx3-ubyte'.

    Raises
    ------
    FileNotFoundError
        If it is missing.

    Examples
    --------
    >>> from chainermn.datasets import idx
    >>> idx.find("/nowhere", "train-labels-idx1-ubyte")
    Traceback (most recent call last):
    FileNotFoundError: /nowhere contains no train-labels-idx1-ubyte, gzipped or not
    """
    return _find_all(folder, name)[0]


def read_data_set(folder: str | os.PathLike[str]) -> tuple[Labeled, Labeled]:
    """Return images and labels to train on and to test with.

    Parameters
    ----------
    folder : path
        Folder with four files, gzipped or not, under the names that MNIST's have when downloaded
        (``train-images-idx3-ubyte.gz``) or after unpacking (``train-images.idx3-ubyte``, or a
        folder of the same name with the file in it).

    Returns
    -------
    (images, labels), (images, labels) : tuple of array of uint8
        For each part, read-only arrays of shape (n, height, width) and (n,).

    Raises
    ------
    OSError
        If a file is missing.
    ValueError
        If a file is damaged, empty or something else; if it is there twice, with different
        contents; or if the parts do not fit each other.

    Examples
    --------
    >>> from chainermn.datasets import idx
    >>> if comm.rank == 0:
    ...     for name, shape in (("images-idx3", [1, 2, 2]), ("labels-idx1", [1])):
    ...         header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
    ...         for part in ("train", "t10k"):
    ...             with chainermn.files.atomic_write(f"{part}-{name}-ubyte", "wb") as file:
    ...                 n = file.write(header + bytes([7] * np.prod(shape)))
    ...     _, (test_images, test_labels) = idx.read_data_set(".")
    ...     print(test_images.tolist(), test_labels.tolist())
    [[[7, 7], [7, 7]]] [7]
    """
    train, test = (read_part(folder, part) for part in _PARTS)
    _check_sizes(folder, train[0], test[0])
    return train, test


def read_images(folder: str | os.PathLike[str]) -> tuple[Bytes, Bytes]:
    """Return images to train on and to test with; see `read_data_set`.

    Examples
    --------
    >>> from chainermn.datasets import idx
    >>> idx.read_images("/nowhere")
    Traceback (most recent call last):
    FileNotFoundError: /nowhere contains no train-images-idx3-ubyte, gzipped or not
    """
    train, test = (_read(folder, f"{part}-images-idx3-ubyte", 3) for part in _PARTS)
    _check_sizes(folder, train, test)
    return train, test


def read_part(folder: str | os.PathLike[str], part: str) -> Labeled:
    """Return images and labels of ``part``, 'train' or 't10k'; see `read_data_set`.

    Examples
    --------
    >>> from chainermn.datasets import idx
    >>> idx.read_part("/nowhere", "t10k")
    Traceback (most recent call last):
    FileNotFoundError: /nowhere contains no t10k-images-idx3-ubyte, gzipped or not
    """
    names = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    images, labels = _read(folder, names[0], 3), _read(folder, names[1], 1)
    if len(images) != len(labels):
        paths = [shown(find(folder, name)) for name in names]
        raise ValueError(
            f"{paths[0]} has {len(images)} images, but {paths[1]} has {len(labels)} labels"
        )
    return images, labels


def _check_sizes(folder: str | os.PathLike[str], train: Bytes, test: Bytes) -> None:
    if train.shape[1:] != test.shape[1:]:
        sizes = [f"{height}x{width}" for _, height, width in (train.shape, test.shape)]
        raise ValueError(
            f"{shown(folder)}: expected test images (t10k) of {sizes[0]} pixels, the size of the "
            f"training images, got {sizes[1]}"
        )


def _candidates(folder: str | os.PathLike[str], name: str) -> list[Path]:
    """Return the files in a folder that have one of the names under which people keep a file."""
    names = [name, f"{name}.gz"]
    names += [name.replace("-idx", ".idx") for name in names]
    places = [Path(folder, name) for name in names]
    places += [place / name for place in places for name in names]
    return [place for place in places if place.exists() and not place.is_dir()]


def _find_all(folder: str | os.PathLike[str], name: str) -> list[Path]:
    if not (found := _candidates(folder, name)):
        raise FileNotFoundError(
            f"{shown(Path(folder).resolve())} contains no {name}, gzipped or not"
        )
    return found


def _read(folder: str | os.PathLike[str], name: str, ndim: int) -> Bytes:
    (path, array), *others = ((path, _read_array(path, ndim)) for path in _find_all(folder, name))
    for other_path, other in others:
        if not np.array_equal(array, other):
            raise ValueError(
                f"{shown(path)} and {shown(other_path)} differ: delete the one that is wrong"
            )
    return array


def _read_array(path: Path, ndim: int) -> Bytes:
    magic, length = bytes([0, 0, 8, ndim]), 4 + 4 * ndim
    with open_unpacked(path) as file:
        header = file.read(length)
        if header[:4] != magic:
            raise ValueError(
                f"{shown(path)}: expected an IDX file that starts with {magic.hex(' ')} "
                f"({ndim} dimension{'s' * (ndim > 1)} of unsigned bytes), got "
                f"{header[:4].hex(' ') or 'nothing'}: it begins with {header + file.read(12)!r}"
            )
        shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, length, 4))
        size = math.prod(shape)
        content = file.read(min(size, MOST_BYTES) + 1)
    if len(header) < length or len(content) != size or size > MOST_BYTES:
        more = "at least " if len(content) > size else ""
        raise ValueError(
            f"{shown(path)}: expected {length + size} bytes for an array of shape {shape}, "
            f"got {more}{len(header) + len(content)}"
        )
    if not size:
        raise ValueError(f"{shown(path)}: expected images or labels, got shape {shape}")
    return np.frombuffer(content, np.uint8).reshape(shape)
