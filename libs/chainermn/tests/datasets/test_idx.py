"""Data sets in MNIST's format, as people keep them, and what else may be under their names."""

from __future__ import annotations

import gzip
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from chainermn.datasets import idx

NAMES = [
    f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")
]


def content(array: ArrayLike) -> bytes:
    array = np.asarray(array, np.uint8)
    shape = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


ARRAYS = {
    name: np.random.RandomState(i).randint(0, 256, shape).astype(np.uint8)
    for i, (name, shape) in enumerate(zip(NAMES, [(5, 2, 3), (5,), (4, 2, 3), (4,)], strict=True))
}
CONTENTS = {name: content(array) for name, array in ARRAYS.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, plain in CONTENTS.items():
        (tmp_path / name).write_bytes(plain)
    return tmp_path


def rename(folder: Path, new: Callable[[str], str], pack: bool = False) -> None:
    for name in NAMES:
        plain = (folder / name).read_bytes()
        (folder / name).unlink()
        path = folder / new(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(plain) if pack else plain)


@pytest.mark.parametrize(
    "new",
    [
        "{}",
        "{}.gz",
        "{0}/{0}",
        "{0}.gz/{0}",
        "{.}",  # Kaggle's and 7-zip's
        "{.}.gz",
        "{.}/{.}",
    ],
)
@pytest.mark.parametrize("pack", [False, True])
def test_names_and_packing_that_people_have(folder: Path, new: str, pack: bool) -> None:
    def name_of(name: str) -> str:
        return new.replace("{.}", name.replace("-idx", ".idx")).format(name)

    rename(folder, name_of, pack)
    assert idx.is_in(folder)
    assert idx.find(folder, NAMES[3]) == folder / name_of(NAMES[3])
    read = [array for part in idx.read_data_set(folder) for array in part]
    for name, array in zip(NAMES, read, strict=True):
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, ARRAYS[name])
    for name, array in zip(NAMES[::2], idx.read_images(folder), strict=True):
        np.testing.assert_array_equal(array, ARRAYS[name])


def test_the_same_file_twice_must_be_the_same(folder: Path) -> None:
    again = folder / NAMES[1]
    (folder / f"{NAMES[1]}.gz").write_bytes(gzip.compress(again.read_bytes()))
    np.testing.assert_array_equal(idx.read_part(folder, "train")[1], ARRAYS[NAMES[1]])
    again.write_bytes(content(np.zeros(5)))
    message = f"{again} and {again}.gz differ: delete the one that is wrong"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        idx.read_data_set(folder)


PLAIN = CONTENTS[NAMES[0]]
PACKED = gzip.compress(PLAIN, mtime=0)
MAGIC = "expected an IDX file that starts with 00 00 08 03 (3 dimensions of unsigned bytes), got "


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (b"", f"{MAGIC}nothing: it begins with b''"),
        (
            b"<!DOCTYPE html><html>404 Not Found</html>",
            f"{MAGIC}3c 21 44 4f: it begins with b'<!DOCTYPE html><html>404 Not'",
        ),
        (content(np.zeros(6)), f"{MAGIC}00 00 08 01: it begins with "),
        (b"\0\0\x0d\3" + PLAIN[4:], f"{MAGIC}00 00 0d 03: it begins with "),
        (PLAIN[:-1], "expected 46 bytes for an array of shape (5, 2, 3), got 45"),
        (PLAIN + b"\0", "expected 46 bytes for an array of shape (5, 2, 3), got at least 47"),
        (PLAIN[:8], "expected 16 bytes for an array of shape (5, 0, 0), got 8"),
        (content(np.zeros((0, 2, 3))), "expected images or labels, got shape (0, 2, 3)"),
        (content(np.zeros((5, 0, 3))), "expected images or labels, got shape (5, 0, 3)"),
        (
            PLAIN[:4] + b"\x7f" * 12,
            f"expected {16 + 0x7F7F7F7F**3} bytes for an array of shape "
            "(2139062143, 2139062143, 2139062143), got 16",
        ),
        (PACKED[:-4], "damaged gzip file (Compressed file ended before the end-of-stream mark"),
        (PACKED[:10] + b"\xff" * 20, "damaged gzip file (Error -3 while decompressing data"),
        (PACKED[:-8] + bytes(8), "damaged gzip file (CRC check failed"),
        (content(np.zeros((4, 2, 3))), "images-idx3-ubyte has 4 images, but "),
        (content(np.zeros((5, 3, 2))), "expected test images (t10k) of 3x2 pixels, the size of"),
    ],
)
def test_what_is_not_images_is_refused(folder: Path, spoilt: bytes, message: str) -> None:
    (folder / NAMES[0]).write_bytes(spoilt)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        idx.read_data_set(folder)
    assert str(caught.value).startswith(str(folder))


def test_what_never_ends_or_unpacks_to_gigabytes_is_not_read(folder: Path) -> None:
    path = folder / NAMES[0]
    path.write_bytes(gzip.compress(PLAIN) + gzip.compress(bytes(1 << 24)) * 64)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"expected 46 bytes .* got at least 47"):
            idx.read_images(folder)
        path.write_bytes(PLAIN)
        os.truncate(path, 1 << 40)
        with pytest.raises(ValueError, match=r"expected 46 bytes .* got at least 47"):
            idx.read_images(folder)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="expected a regular file, got a pipe or a device"):
        idx.read_images(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / NAMES[3]).unlink()
    message = f"{folder} contains no t10k-labels-idx1-ubyte, gzipped or not"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        idx.read_data_set(folder)
    assert idx.is_in(folder)
    assert not idx.is_in(folder / "nowhere")
