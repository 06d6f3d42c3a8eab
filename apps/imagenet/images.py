"""Image files as arrays of red, green and blue."""

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps

from chainermn.files import open_regular

Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels
Chooser = Callable[[int, int], Box]  # from width and height to the box to cut out

# The only formats to read, whatever a file is called. Pillow knows many more, and runs other
# programs for some of them.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# Pixels that an image may have; a file of a few bytes can claim billions. Each takes, with Pillow
# 13, up to 17 bytes of memory as WebP, up to 13 in other formats, and 5 as RGB.
MOST_PIXELS = 100_000_000
# Bytes of a file: four colors of 16 bits for each pixel.
MOST_BYTES = 8 * MOST_PIXELS

HINT = "--allow-outside takes paths and links that lead out of --root"

# Pillow warns of images larger than this, and refuses images twice as large.
Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def endings() -> set[str]:
    """Return the file name endings that are read, such as ``.jpg``."""
    return {ending for ending, name in Image.registered_extensions().items() if name in FORMATS}


def leads_out(path: str | Path, root: Path) -> bool:
    """Tell whether a path, relative to a folder without links, leads out of it."""
    return not Path(os.path.realpath(root / path)).is_relative_to(root)


def open_image(path: str | Path, root: Path | None = None) -> BinaryIO:
    """Open an image file, which must be in a folder without links if one is given.

    Raises
    ------
    OSError, ValueError
        Also if it is a device or pipe, or has more than `MOST_BYTES`.
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


def read_image(
    path: str | Path | BinaryIO, size: int, choose: Chooser, root: Path | None = None
) -> np.ndarray:
    """Read part of an image, scaled to a square.

    Parameters
    ----------
    path : path or binary file
        File in any of `FORMATS` and of any mode: gray, with a palette, transparent (put on white),
        CMYK, 16 bits. It is rotated upright according to its EXIF data.
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
    with Image.open(path, formats=FORMATS) as image:
        # Whether rotating it upright swaps height and width.
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
        width, height = image.size[::-1] if turned else image.size
        left, upper, right, lower = choose(width, height)
        # JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, in proportionally less time.
        enough = (
            math.ceil(width * size / (right - left)),
            math.ceil(height * size / (lower - upper)),
        )
        image.draft(None, enough[::-1] if turned else enough)
        ImageOps.exif_transpose(image, in_place=True)
        upright = to_rgb(image)
        x, y = upright.width / width, upright.height / height
        box = left * x, upper * y, min(right * x, upright.width), min(lower * y, upright.height)
        pixels = upright.resize((size, size), Image.Resampling.BILINEAR, box)
    return np.ascontiguousarray(np.asarray(pixels).transpose(2, 0, 1))


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode with red, green and blue, 8 bits each."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        # Pillow would cut off everything brighter than 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        if image.mode != "RGBA":  # converting would copy it
            image = image.convert("RGBA")
        upright = Image.new("RGB", image.size, "white")
        upright.paste(image, mask=image)
        return upright
    return image.convert("RGB")


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
