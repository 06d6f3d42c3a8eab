"""Read pictures as people see them: upright, on white, as red, green and blue of 8 bits.

This module needs Pillow, which the extra ``pictures`` brings. Importing it sets Pillow's limit
of pixels to `MOST_PIXELS`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError, features

from chainermn.datasets.names import shown
from chainermn.files import open_regular

#: The only formats that are read, whatever a file is called, besides HEIF with pillow-heif. Pillow
#: knows many more, and runs other programs for some of them.
FORMATS: tuple[str, ...] = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
if "avif" in features.modules and features.check("avif"):
    FORMATS = ("AVIF", *FORMATS)

#: Pixels that a picture may have; a file of a few bytes can claim billions. Each takes up to 17
#: bytes of memory with Pillow 13.
MOST_PIXELS = 100_000_000
#: Bytes that a file may have: four colors of 16 bits for each pixel.
MOST_BYTES = 8 * MOST_PIXELS

# Pillow warns of pictures larger than this, and refuses pictures twice as large.
Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
# It warns of broken EXIF without the name of the file, even if nothing else is wrong with it.
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")

_HEIF_ENDINGS = {".heic", ".heif", ".hif"}
# What a file of this format has after "ftyp", which begins at its fifth byte.
_HEIF_BRANDS = b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Tags of TIFF.
_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _BANDS, _SAMPLE_FORMAT = 256, 257, 258, 262, 277, 339
_LOWEST, _HIGHEST = (340, 280), (341, 281)  # of the second kind only if there is none of the first
_SIGNED = 2  # a sample format
_WHITE_IS_ZERO = 0  # a photometric interpretation

# What Pillow multiplies the gray values of PNG by, except the transparent one.
_FACTORS = {"L;2": 85, "L;4": 17}

_PIXELS_AT_ONCE = 1 << 20

_REMEDY = (
    "save it with 8 or 16 bits, or as TIFF with tags SMinSampleValue and SMaxSampleValue, in "
    "Pillow by image.save('a.tif', tiffinfo={340: 0.0, 341: 1.0})"
)


def endings() -> set[str]:
    """Return the file name endings that are read, such as ``.jpg``.

    ``.heic`` is one of them if pillow-heif is installed.

    Examples
    --------
    >>> from chainermn.datasets import pictures
    >>> {".jpg", ".png"} < pictures.endings()
    True
    """
    found = {ending for ending, name in Image.registered_extensions().items() if name in FORMATS}
    return found | _HEIF_ENDINGS if _has_heif() else found


def hint(ending: str) -> str:
    """Return what to install for files with an ending that is not read; empty if nothing helps.

    Examples
    --------
    >>> from chainermn.datasets import pictures
    >>> pictures.hint(".txt")
    ''
    """
    if ending.lower() in _HEIF_ENDINGS and not _has_heif():
        return "'pip install pillow-heif' makes them readable"
    if ending.lower() in (".avif", ".avifs") and "AVIF" not in FORMATS:
        return "'pip install --upgrade pillow' makes them readable"
    return ""


class Picture:
    """A picture that can be read, of which only the header has been; see `open_picture`.

    Parameters
    ----------
    image : PIL.ImageFile.ImageFile
        Image that Pillow has opened, but not loaded.

    Raises
    ------
    ValueError
        If its file does not say which of its numbers are black and white, or which of its bands
        are colors.
    """

    def __init__(self, image: ImageFile.ImageFile) -> None:
        self._image = image
        self._range = _range(image)
        _correct_transparency(image)

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture; PNG has to be decoded for them."""
        size = self._image.size
        if self._image.format == "TIFF":  # for which Pillow may have swapped them
            tags = _tags(self._image)
            size = tags[_WIDTH], tags[_HEIGHT]
        return size[::-1] if _orientation(self._image) in (5, 6, 7, 8) else size

    def rgb(self, at_least: tuple[int, int] | None = None) -> Image.Image:
        """Decode the picture, once.

        Parameters
        ----------
        at_least : tuple of int, optional
            Width and height that are enough. JPEG is then decoded at 1/2, 1/4 or 1/8 of its size
            if that is not less, in proportionally less time.

        Returns
        -------
        PIL.Image.Image
            The upright picture, of mode RGB, on white where it is transparent.

        Raises
        ------
        OSError, ValueError, SyntaxError
            If the file is damaged, or uses little of its range and does not state that; Pillow
            may raise other exceptions too.
        """
        image = self._image
        is_on_its_side = self.size != image.size  # which is known only before loading
        if at_least and image.format in ("JPEG", "MPO"):  # others would decode a thumbnail
            image.draft(None, at_least[::-1] if is_on_its_side else at_least)
        image.load()
        rgb = _to_rgb(image) if self._range is None else _scale(image, *self._range)
        # Pillow turns TIFF itself, which then has no orientation anymore.
        turn = _TURNS.get(_orientation(image))
        return rgb if turn is None else rgb.transpose(turn)


@contextlib.contextmanager
def open_picture(source: str | os.PathLike[str] | BinaryIO) -> Iterator[Picture]:
    """Open a picture and read its header.

    The guide about pictures says what becomes of each mode and format. Of a path, anything that
    is raised until the ``with`` block ends becomes a `ValueError` with the path.

    Parameters
    ----------
    source : path or binary file
        File in one of `FORMATS`, or in HEIF if pillow-heif is installed.

    Yields
    ------
    Picture
        The picture, until the ``with`` block ends.

    Raises
    ------
    OSError, ValueError
        If the file is missing, is a device or pipe, has more than `MOST_BYTES`, is not in one of
        these formats, or has pixels that cannot be read.
    PIL.Image.DecompressionBombError
        If the picture of a binary file has more than `MOST_PIXELS`.

    Examples
    --------
    >>> from PIL import Image
    >>> from chainermn.datasets import pictures
    >>> if comm.rank == 0:
    ...     Image.new("LA", (20, 10)).save("transparent.png")
    ...     with pictures.open_picture("transparent.png") as picture:
    ...         print(picture.size, picture.rgb().getpixel((0, 0)))
    (20, 10) (255, 255, 255)
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, (str, os.PathLike)):
            file = stack.enter_context(open_regular(source, MOST_BYTES))
            stack.enter_context(_naming(source))
            source = file
        yield Picture(stack.enter_context(_open(source)))


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Pillow's decoders each have their own
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{shown(path)}: {kind}{error}") from error


def _has_heif() -> bool:
    return importlib.util.find_spec("pillow_heif") is not None


def _open(file: BinaryIO) -> ImageFile.ImageFile:
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        file.seek(0)
        head = file.read(12)
    ending = ""
    if head[4:8] == b"ftyp":
        ending = {b"avif": ".avif", **dict.fromkeys(_HEIF_BRANDS, ".heic")}.get(head[8:], "")
    if ending == ".heic" and _has_heif():
        from pillow_heif import register_heif_opener

        register_heif_opener()
        return Image.open(file, formats=["HEIF"])
    remedy = hint(ending) or "save it as PNG or JPEG"
    expected = f"expected a picture in one of {', '.join(FORMATS)}, of a kind that Pillow reads"
    raise ValueError(f"{expected}, got {head[:4].hex(' ') or 'an empty file'} ...; {remedy}")


def _orientation(image: ImageFile.ImageFile) -> Any:
    """Return how the picture lies; a block of EXIF that is broken says nothing about that."""
    if image.format == "PNG":
        # Reading EXIF would do so: damaged pixels would raise in the ``try``, and never again.
        image.load()
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        return None


def _tags(image: ImageFile.ImageFile) -> Any:
    return image.tag_v2  # type: ignore[attr-defined]


def _first_number(image: ImageFile.ImageFile, *tags: int) -> float:
    """Return the first number in the first of these tags of TIFF that there is; otherwise NaN."""
    found = [value for value in map(_tags(image).get, tags) if value is not None]
    try:
        return float(found[0][0] if isinstance(found[0], tuple) else found[0])
    except (IndexError, TypeError, ValueError):
        return math.nan


def _range(image: ImageFile.ImageFile) -> tuple[float, float, bool] | None:
    """Return the numbers that are black and white, and whether the file or its format states them.

    None if Pillow has made them 0 and 255.
    """
    is_tiff = image.format == "TIFF"
    if is_tiff and (bands := _first_number(image, _BANDS)) > 4:
        raise ValueError(f"expected at most 4 bands, got {bands:.0f}: save three of them as RGB")
    is_signed = is_tiff and _first_number(image, _SAMPLE_FORMAT) == _SIGNED
    if image.mode[0] not in "IF" and not (image.mode == "L" and is_signed):
        return None
    if not is_tiff:
        low, high = 0.0, 65535.0 if image.mode[0] == "I" else math.nan
    else:
        low, high = _first_number(image, *_LOWEST), _first_number(image, *_HIGHEST)
    is_stated = image.format == "PPM" or (is_tiff and high > low)
    if image.mode.startswith("I;16") and (math.isnan(high - low) or high == low):
        low, high = 0, 2 ** _first_number(image, _BITS) - 1
    if not 0 < high - low < math.inf:
        raise ValueError(
            f"its gray values (mode {image.mode}{', signed' if is_signed else ''}) have no stated "
            f"range: {_REMEDY}"
        )
    if is_tiff and _first_number(image, _PHOTOMETRIC) == _WHITE_IS_ZERO:
        return high, low, is_stated
    return low, high, is_stated


def _scale(image: ImageFile.ImageFile, black: float, white: float, is_stated: bool) -> Image.Image:
    """Return an image of numbers as one of red, green and blue."""
    numbers: NDArray[Any] = np.asarray(image)
    if not is_stated and numbers.min() < numbers.max() < max(black, white) / 16:
        raise ValueError(
            f"its gray values (mode {image.mode}) have no stated range, and reach only from "
            f"{numbers.min()} to {numbers.max()}, so all would look alike: {_REMEDY}"
        )
    if image.format == "TIFF":  # for which Pillow's modes have the right bits, but not the sign
        is_signed = _first_number(image, _SAMPLE_FORMAT) == _SIGNED
        if numbers.dtype == np.int32 and not is_signed:
            numbers = numbers.view(np.uint32)
        elif numbers.dtype == np.uint8:
            numbers = numbers.view(np.int8)
    if numbers.dtype.itemsize == 2:
        pixels = _grays_of_16_bits(black, white)[numbers]
    else:
        pixels = np.empty(numbers.shape, np.uint8)
        flat, out = numbers.reshape(-1), pixels.reshape(-1)
        for begin in range(0, len(flat), _PIXELS_AT_ONCE):
            part = slice(begin, begin + _PIXELS_AT_ONCE)
            out[part] = _grays(flat[part], black, white)
    if "transparency" in image.info:
        pixels[numbers == image.info["transparency"]] = 255
    return Image.fromarray(pixels).convert("RGB")


def _grays(numbers: NDArray[Any], black: float, white: float) -> NDArray[np.uint8]:
    grays = (numbers.astype(np.float64) - black) * (255 / (white - black))
    if not np.isfinite(grays).all():
        raise ValueError("some of its pixels are infinite or not numbers (NaN)")
    return np.rint(grays.clip(0, 255)).astype(np.uint8)


@functools.lru_cache(maxsize=8)
def _grays_of_16_bits(black: float, white: float) -> NDArray[np.uint8]:
    return _grays(np.arange(1 << 16), black, white)


def _correct_transparency(image: ImageFile.ImageFile) -> None:
    """Give the transparent color of PNG the 8 bits that Pillow will give the pixels."""
    color = image.info.get("transparency")
    if color is None or image.format != "PNG":
        return
    kind = image.tile[0][3]
    if kind in _FACTORS:
        image.info["transparency"] = color * _FACTORS[kind]
    elif kind == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in color)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of 8 bits with red, green and blue, on white."""
    if image.has_transparency_data:
        if image.mode == "La":
            image = image.convert("LA")
        if image.mode != "RGBA":  # converting would copy it
            image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        return white
    return image if image.mode == "RGB" else image.convert("RGB")
