"""Image files as arrays of red, green and blue."""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from chainermn.datasets.pictures import MOST_BYTES, open_picture
from chainermn.files import open_regular

Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels
Chooser = Callable[[int, int], Box]  # from width and height to the box to cut out

HINT = "--allow-outside takes paths and links that do"


def leads_out(path: str | Path, root: Path) -> bool:
    """Tell whether a path, relative to a folder without links, leads out of it."""
    return not Path(os.path.realpath(root / path)).is_relative_to(root)


def open_image(path: str | Path, root: Path | None = None) -> BinaryIO:
    """Open an image file, which must be in a folder without links if one is given.

    Raises
    ------
    OSError, ValueError
        Also if it is a device or pipe, or has more than ``pictures.MOST_BYTES``.
    """
    file = open_regular(path, MOST_BYTES)
    if root is not None:
        try:  # Linux tells where an open file is; following a path takes longer than opening it
            is_inside = os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(f"{root}/")
        except OSError:
            is_inside = False
        if not is_inside and leads_out(path, root):
            file.close()
            raise ValueError(f"it leads out of {root}; {HINT}")
    return file


def check_header(path: str | Path, root: Path | None = None) -> None:
    """Raise what `read_image` would raise for a file's header, without decoding the file."""
    with open_image(path, root) as file, open_picture(file):
        pass


def check_file(path: str | Path, root: Path | None = None) -> None:
    """Raise what `read_image` would raise; JPEG is decoded at an eighth, in less time."""
    read_image(path, 8, partial(center_box, share=1), root)


def read_image(
    path: str | Path | BinaryIO, size: int, choose: Chooser, root: Path | None = None
) -> np.ndarray:
    """Read part of an image, scaled to a square.

    Parameters
    ----------
    path : path or binary file
        File that `chainermn.datasets.pictures` reads.
    size : int
        Height and width of the result.
    choose : callable
        ``choose(width, height)`` of the upright image is the box to cut out.
    root : path, optional
        Folder without links that the file must be in, also by its own links.

    Returns
    -------
    array of uint8
        Array of shape (3, size, size): red, green, blue.

    Raises
    ------
    OSError, ValueError, SyntaxError
        If the file is damaged, not an image, or too large; Pillow may raise other exceptions too.
    """
    if isinstance(path, (str, Path)):
        with open_image(path, root) as file:
            return read_image(file, size, choose)
    with open_picture(path) as picture:
        width, height = picture.size
        left, upper, right, lower = choose(width, height)
        enough = (
            math.ceil(width * size / (right - left)),
            math.ceil(height * size / (lower - upper)),
        )
        upright = picture.rgb(enough)
        x, y = upright.width / width, upright.height / height
        box = left * x, upper * y, min(right * x, upright.width), min(lower * y, upright.height)
        pixels = upright.resize((size, size), Image.Resampling.BILINEAR, box)
    return np.ascontiguousarray(np.asarray(pixels).transpose(2, 0, 1))


def random_box(width: int, height: int, random: np.random.Generator, least: float) -> Box:
    """Choose a share of an image's area, from ``least`` to 1, of an aspect ratio of 3/4 to 4/3.

    With a ``least`` of 0.08 it is the augmentation of GoogLeNet (Szegedy et al., 2015).
    """
    for _ in range(10):
        area = width * height * random.uniform(least, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, upper = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, upper, left + w, upper + h
    return center_box(width, height, 1)


def center_box(width: int, height: int, share: float) -> Box:
    """Choose a square in the middle; ``share`` is its side divided by the image's shorter side."""
    side = min(width, height) * share
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side
