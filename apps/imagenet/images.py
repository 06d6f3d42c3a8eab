"""Image files as arrays of red, green and blue."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps

Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels
Chooser = Callable[[int, int], Box]  # from width and height to the box to cut out

# A photograph of ILSVRC2012 has half a million pixels; a file of a few bytes can claim billions.
Image.MAX_IMAGE_PIXELS = 200_000_000

# Pillow recognises them, but decodes none.
WITHOUT_DECODER = {"BUFR", "GRIB", "HDF5", "MPEG"}


def endings() -> set[str]:
    """Return what names of the files that Pillow reads end with, such as ``.jpg``."""
    formats = Image.registered_extensions()
    return {e for e, f in formats.items() if f in Image.OPEN and f not in WITHOUT_DECODER}


def read_image(path: str | Path | BinaryIO, size: int, choose: Chooser) -> np.ndarray:
    """Read a part of an image, scaled to a square.

    Parameters
    ----------
    path : path or binary file
        In any format that Pillow reads, of any mode: grey, with a palette, transparent
        (put on white), CMYK, 16 bits. It is turned upright if its EXIF data say how.
    size : int
        Height and width of the result.
    choose : callable
        ``choose(width, height)`` of the upright image is the box to cut out.

    Returns
    -------
    array of uint8
        Of shape (3, size, size): red, green, blue.

    Raises
    ------
    OSError, ValueError, SyntaxError
        Or what else Pillow raises, if the file is damaged or no image.
    """
    with Image.open(path) as image:
        turned = _is_turned(image)
        width, height = image.size[::-1] if turned else image.size
        left, upper, right, lower = choose(width, height)
        # JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, for as much less time.
        enough = (
            math.ceil(width * size / (right - left)),
            math.ceil(height * size / (lower - upper)),
        )
        image.draft(None, enough[::-1] if turned else enough)
        upright = to_rgb(ImageOps.exif_transpose(image))
        x, y = upright.width / width, upright.height / height
        box = left * x, upper * y, min(right * x, upright.width), min(lower * y, upright.height)
        pixels = upright.resize((size, size), Image.Resampling.BILINEAR, box)
    return np.ascontiguousarray(np.asarray(pixels).transpose(2, 0, 1))


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode with red, green and blue, 8 bits each."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        # Pillow would cut off all that is brighter than 255.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _is_turned(image: Image.Image) -> bool:
    """Tell whether upright it has the height for its width."""
    return image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)


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
    return centre_box(width, height, 1)


def centre_box(width: int, height: int, share: float) -> Box:
    """Choose a square in the middle; ``share`` is its side over the image's shorter side."""
    side = min(width, height) * share
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side
