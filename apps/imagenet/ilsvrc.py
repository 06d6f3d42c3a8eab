"""The classes of ILSVRC2012's validation images, from several kinds of files."""

import csv
import io
import os
import re
import struct
import zlib
from codecs import BOM_UTF8
from pathlib import Path

from chainermn.files import read_bytes

MOST_BYTES = 1 << 23  # of meta.mat, and of what is in it
MOST_BYTES_OF_TEXT = 1 << 26
COMPRESSED = 15  # the type of an element of a MAT file
SYNSET = re.compile(r"n\d{8}")
GROUND_TRUTHS = (
    "val.txt",
    "LOC_val_solution.csv",
    "ILSVRC2012_validation_ground_truth.txt",
    "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
)


def read_ground_truth(path: Path, names: list[str], numbers: dict[str, int]) -> list[int]:
    """Return the classes of the validation images.

    Parameters
    ----------
    path : path
        ``LOC_val_solution.csv``, or a file with a line for each image, in the order of their
        names. A line ends with a synset (``n01440764``) or with a number from 0 in the order of
        the synsets (``name number``), or it is the development kit's number alone, for which
        ``meta.mat`` beside the file gives the synset (needs SciPy).
    names : list of str
        Names of the files, in order.
    numbers : dict
        Number of the class of each synset.

    Raises
    ------
    ValueError
        If a line has another form, or the file is for other images.
    """
    if path.suffix == ".csv":
        try:
            file = csv.DictReader(_lines(path))
            rows = {row["ImageId"]: f"{row['PredictionString']} " for row in file}
            return [numbers[rows[Path(name).stem].split(" ")[0]] for name in names]
        except KeyError as error:
            raise ValueError(f"{path} does not fit the images: {error} is missing") from None
        except csv.Error as error:
            raise ValueError(f"{path}: {error}") from None
    lines = [line.split() for line in _lines(path) if line.strip()]
    if len(lines) != len(names):
        raise ValueError(f"{path} has {len(lines)} lines for {len(names)} images")
    if all(len(line) > 1 for line in lines):
        by_name = {Path(line[0]).name: line[-1] for line in lines}
        if set(by_name) != set(names):
            raise ValueError(f"{path} names other images than the folder has")
        last = [by_name[name] for name in names]
    else:
        last = [line[0] for line in lines]
    synsets = {}
    if all(len(line) == 1 and line[0].isdecimal() for line in lines):
        synsets = read_development_kit(path.with_name("meta.mat"))
    try:
        if synsets:
            last = [synsets[int(word)] for word in last]
        labels = [numbers[word] if SYNSET.fullmatch(word) else int(word) for word in last]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: {error} is not a class of the training images") from None
    if not all(0 <= label < len(numbers) for label in labels):
        raise ValueError(f"{path}: expected numbers from 0 to {len(numbers) - 1}")
    return labels


def read_development_kit(path: Path) -> dict[int, str]:
    """Return the synsets by the development kit's own numbers, ``ILSVRC2012_ID``."""
    from scipy.io import loadmat

    content = read_bytes(path, MOST_BYTES)
    try:
        file = io.BytesIO(_unpacked(content))
        synsets = loadmat(file, variable_names=["synsets"], squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    except Exception as error:  # SciPy raises all kinds of exceptions
        raise ValueError(f"{path}: no meta.mat of ILSVRC2012 ({error!r})") from None


def _lines(path: Path) -> list[str]:
    content = read_bytes(path, MOST_BYTES_OF_TEXT).removeprefix(BOM_UTF8)
    return [os.fsdecode(line.removesuffix(b"\r")) for line in content.split(b"\n")]


def _unpacked(content: bytes) -> bytearray:
    """Decompress a MAT file of version 5, because SciPy would unpack gigabytes."""
    element = struct.Struct("<II" if content[126:128] == b"IM" else ">II")
    unpacked, begin = bytearray(content[:128]), 128
    while begin < len(content):
        kind, size = element.unpack_from(content, begin)
        end = begin + element.size + size
        if kind == COMPRESSED:
            packed = content[begin + element.size : end]
            unpacked += zlib.decompressobj().decompress(packed, MOST_BYTES)
        else:
            unpacked += content[begin:end]
        if len(unpacked) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes in it")
        begin = end
    return unpacked
