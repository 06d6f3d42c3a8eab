"""Pictures are read upright, on white and with the right colors, or refused.

A known picture is saved in every mode, format and orientation that Pillow can write. What is read
back is compared with colors that NumPy computes.
"""

import importlib
import io
import os
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms

from chainermn.datasets import pictures

HEIGHT, WIDTH = 32, 48
NO_RANGE = "have no stated range: save it with 8 or 16 bits, or as TIFF with tags"

# How the upright picture is stored with each orientation.
STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[:, ::-1],
}
# How far the colors of a mode may be from NumPy's.
MODES = {
    "1": 0,
    "L": 0.5,
    "LA": 0.5,
    "La": 0.5,
    "P": 0,
    "PA": 0,
    "RGB": 0,
    "RGBA": 0,
    "RGBX": 0,
    "RGBa": 0,
    "CMYK": 0,
    "YCbCr": 3,
    "LAB": 21,  # which has fewer blues than RGB
    "HSV": 3,
}
# The modes that Pillow 13 can write in a format; later releases may write more.
WRITTEN = {
    "BMP": "1 L P RGB RGBA",
    "GIF": "1 L LA P RGB RGBA",
    "JPEG": "1 L RGB RGBX CMYK YCbCr",
    "MPO": "1 L RGB RGBX CMYK YCbCr",
    "PNG": "1 L LA P RGB RGBA",
    "PPM": "1 L RGB RGBA",
    "TIFF": "1 L LA P PA RGB RGBX RGBA CMYK YCbCr LAB",
    "WEBP": "1 L LA P PA RGB RGBX RGBA RGBa CMYK YCbCr LAB HSV",
    "AVIF": "1 L LA P PA RGB RGBX RGBA RGBa CMYK YCbCr LAB HSV",
    "HEIF": "1 L LA La P RGB RGBA RGBa CMYK",
}
WITHOUT_ORIENTATION = {"BMP", "GIF", "PPM"}
SLOW = {"AVIF", "HEIF"}
# What of a picture with transparency Pillow writes without it.
OPAQUE = {("BMP", "RGBA"), ("PPM", "RGBA"), ("GIF", "LA")}
# How to lose as little as possible, and how much that is.
OPTIONS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "MPO": {"quality": 100, "subsampling": 0},
    "WEBP": {"lossless": True},
    "AVIF": {"quality": 100, "subsampling": "4:4:4", "speed": 10},
    "HEIF": {"quality": 100, "chroma": 444},
}
LOSSES = {"JPEG": 1, "MPO": 1, "AVIF": 2, "HEIF": 2}

KNOWN = np.array(
    [
        [(204, 0, 51, 255), (0, 204, 51, 255), (51, 0, 204, 0)],  # the last cannot be seen
        [(255, 204, 0, 255), (51, 51, 51, 255), (153, 0, 0, 255)],
    ],
    np.uint8,
)
KNOWN = KNOWN.repeat(HEIGHT // 2, 0).repeat(WIDTH // 3, 1)
RAMP = np.linspace(0, 1, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)


def in_mode(rgba: np.ndarray, mode: str) -> Image.Image:
    image = Image.fromarray(np.ascontiguousarray(rgba))
    if mode == "PA":
        with_palette = image.convert("RGB").convert("P").convert("PA")
        with_palette.putalpha(image.getchannel("A"))
        return with_palette
    if mode == "La":
        return image.convert("LA").convert("La")
    if mode in ("RGBA", "RGBa", "LA"):
        return image.convert(mode)
    image = image.convert("RGB")
    if mode == "LAB":
        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        return ImageCms.profileToProfile(image, *profiles, outputMode="LAB")
    return image.convert(mode, dither=Image.Dither.NONE)


def seen(rgba: np.ndarray, mode: str, is_opaque: bool = False) -> np.ndarray:
    """Return the colors of a picture in a mode, on white."""
    rgb, alpha = rgba[..., :3].astype(float), rgba[..., 3:] / 255
    if mode[0] in "1L" and mode != "LAB":
        rgb = (rgb @ (0.299, 0.587, 0.114))[..., None].repeat(3, 2)
    if mode == "1":
        rgb = np.where(rgb > 127, 255.0, 0.0)
    if is_opaque or mode[-1] not in "Aa":
        return rgb
    return rgb * alpha + 255 * (1 - alpha)


def save(image: Image.Image, kind: str, orientation: int = 1, **options: Any) -> io.BytesIO:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    if "tiffinfo" in options:  # which replaces EXIF
        options["tiffinfo"] = dict(exif) | options["tiffinfo"]
    file = io.BytesIO()
    image.save(file, kind, exif=exif.tobytes(), **options)
    return file


def read(file: io.BytesIO, at_least: tuple[int, int] | None = None) -> np.ndarray:
    with pictures.open_picture(file) as picture:
        image = picture.rgb(at_least)
        assert image.mode == "RGB"
        assert at_least or image.size == picture.size
        return np.asarray(image).astype(float)


@pytest.mark.parametrize("kind", WRITTEN)
def test_each_mode_and_orientation(kind: str) -> None:
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    if kind == "AVIF" and "AVIF" not in pictures.FORMATS:
        pytest.skip("this Pillow reads no AVIF")
    written = set()
    for mode, tolerance in MODES.items():
        orientations = list(STORED)
        if kind in WITHOUT_ORIENTATION:
            orientations = [1]
        elif kind in SLOW and mode != "RGB":
            orientations = [1, 6]
        for orientation in orientations:
            image = in_mode(STORED[orientation](KNOWN), mode)
            try:
                file = save(image, kind, orientation, **OPTIONS.get(kind, {}))
            except Exception:  # of many kinds; also warnings
                break
            written.add(mode)
            expected = seen(KNOWN, mode, (kind, mode) in OPAQUE)
            tolerance_here = tolerance + LOSSES.get(kind, 0)
            np.testing.assert_allclose(
                read(file), expected, rtol=0, atol=tolerance_here, err_msg=f"{mode} {orientation}"
            )
    assert written >= set(WRITTEN[kind].split())


def gray(numbers: np.ndarray, mode: str | None = None) -> Image.Image:
    image = Image.fromarray(np.ascontiguousarray(numbers))
    return image.convert(mode) if mode else image


def stating(low: float, high: float, tags: tuple[int, int] = (340, 341)) -> dict[str, Any]:
    return {"tiffinfo": dict(zip(tags, (low, high), strict=True))}


@pytest.mark.parametrize(
    ("kind", "dtype", "low", "high", "options"),
    [
        ("PNG", "<u2", 0, 65535, {}),
        ("PPM", "<u2", 0, 65535, {}),
        ("PPM", "<i4", 0, 65535, {}),
        ("TIFF", "<u2", 0, 65535, {}),
        ("TIFF", ">u2", 0, 65535, {}),
        ("TIFF", "<u2", 0, 65535, {"compression": "tiff_lzw"}),
        ("TIFF", "<u2", 100, 4095, stating(100, 4095, (280, 281))),
        ("TIFF", "<u2", 0, 255, stating(0, 255)),
        ("TIFF", "<u2", 0, 65535, stating(0, 0)),
        ("TIFF", "<i4", -(1 << 31), (1 << 31) - 1, stating(-(1 << 31), (1 << 31) - 1)),
        ("TIFF", "<i4", 0, 1000, stating(0, 1000, (280, 281))),
        ("TIFF", "<f4", 0, 1, stating(0.0, 1.0)),
        ("TIFF", "<f4", -1000, 1000, stating(-1000.0, 1000.0)),
    ],
)
def test_numbers_are_scaled_by_their_range(
    kind: str, dtype: str, low: float, high: float, options: dict[str, Any]
) -> None:
    for orientation in [1] if kind == "PPM" else STORED:
        numbers = (low + STORED[orientation](RAMP) * (high - low)).astype(dtype)
        found = read(save(gray(numbers), kind, orientation, **options))
        np.testing.assert_allclose(found, 255 * RAMP[..., None].repeat(3, 2), rtol=0, atol=1)


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("TIFF", "<i4", {}),
        ("TIFF", "<f4", {}),
        ("TIFF", "<f4", stating(1.0, 1.0)),
        ("TIFF", "<f4", stating(1.0, 0.0)),
        ("TIFF", "<f4", stating(0.0, float("inf"))),
        ("TIFF", "<f4", {"tiffinfo": {341: 1.0}}),
        ("PPM", "<f4", {}),
    ],
)
def test_numbers_without_a_range_are_refused_before_they_are_decoded(
    kind: str, dtype: str, options: dict[str, Any]
) -> None:
    file = save(gray(RAMP.astype(dtype)), kind, **options)
    header = io.BytesIO(file.getvalue()[:500])  # of more than 6000 bytes
    mode = {"i": r"I, signed", "f": "F"}[dtype[1]]
    with (
        pytest.raises(ValueError, match=rf"mode {mode}\) {NO_RANGE}"),
        pictures.open_picture(header),
    ):
        pass


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_that_are_hardly_used_are_refused(kind: str) -> None:
    for highest in (255, 4095):
        numbers = (RAMP * highest).astype("<u2")
        message = rf"mode I;16\) have no stated range, and reach only from 0 to {highest}, so all"
        with pytest.raises(ValueError, match=message):
            read(save(gray(numbers), kind))
    for number in (0, 300):  # a dark frame
        assert (read(save(gray(np.full((4, 4), number, "<u2")), kind)) == number // 256).all()


def test_a_range_of_16_bits_may_say_that_all_is_dark() -> None:
    found = read(save(gray((RAMP * 600).astype("<u2")), "TIFF", **stating(0, 65535)))
    assert found.min() == 0 and found.max() == 2


def test_pixels_that_are_no_numbers_are_refused() -> None:
    for number in (np.nan, np.inf):
        numbers = RAMP.astype(np.float32)
        numbers[7, 8] = number
        with pytest.raises(ValueError, match="some of its pixels are infinite or not numbers"):
            read(save(gray(numbers), "TIFF", **stating(0.0, 1.0)))


def tiff(tags: dict[int, int | float], pixels: bytes) -> io.BytesIO:
    """Return a TIFF file of a row of four pixels with these tags, which Pillow cannot write."""
    tags = {256: 4, 257: 1, 259: 1, 262: 1, 277: 1, 278: 1, 279: len(pixels)} | tags
    tags[273] = 8 + 2 + 12 * (len(tags) + 1) + 4  # where the pixels begin
    entries = b"".join(
        struct.pack("<HHI", tag, 11 if isinstance(value, float) else 4, 1)
        + struct.pack("<f" if isinstance(value, float) else "<I", value)
        for tag, value in sorted(tags.items())
    )
    header = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    return io.BytesIO(header + entries + bytes(4) + pixels)


@pytest.mark.parametrize(
    ("tags", "pixels", "expected"),
    [
        ({258: 32, 340: 0.0, 341: 2.0**32}, struct.pack("<4I", 0, 1 << 30, 1 << 31, 3 << 30), 64),
        ({258: 16, 262: 0}, struct.pack("<4H", 65535, 3 << 14, 1 << 15, 1 << 14), 64),
        ({258: 12}, bytes.fromhex("000400 800c00"), 64),  # 0, 0x400, 0x800, 0xc00
        ({258: 8, 339: 2, 340: -128.0, 341: 128.0}, bytes([128, 192, 0, 64]), 64),
    ],
    ids=["uint32", "white is 0", "12 bits", "int8"],
)
def test_other_numbers_of_tiff(tags: dict[int, Any], pixels: bytes, expected: int) -> None:
    np.testing.assert_allclose(read(tiff(tags, pixels))[0, :, 0], np.arange(4) * expected, atol=1)


def test_more_bands_than_colors_are_refused_by_their_header() -> None:
    file = tiff({277: 5, 262: 2, 258: 8, 338: 0}, bytes(20)).getvalue()
    # Two numbers of 16 bits say what the fourth and fifth band are.
    others = struct.pack("<HHI", 338, 4, 1)
    file = io.BytesIO(file.replace(others, struct.pack("<HHI", 338, 3, 2)))
    with (
        pytest.raises(ValueError, match="expected at most 4 bands, got 5: save three of them"),
        pictures.open_picture(file),
    ):
        pass


def test_signed_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"mode L, signed\) {NO_RANGE}"):
        read(tiff({258: 8, 339: 2}, bytes(4)))


def test_gray_multiplied_by_its_alpha() -> None:
    file = tiff({258: 8, 277: 2, 338: 1}, bytes([0, 0, 0, 255, 100, 200, 255, 255]))
    assert read(file)[0, :, 0].tolist() == [255, 0, 155, 255]


def test_gray_of_any_largest_value() -> None:
    file = io.BytesIO(b"P5 4 1 4095\n" + struct.pack(">4H", 0, 1365, 2730, 4095))
    np.testing.assert_allclose(read(file)[0, :, 0], [0, 85, 170, 255], atol=1)


def png(bits: int, color: int, pixels: bytes, transparent: bytes) -> io.BytesIO:
    """Return a PNG file of a row of four pixels, one of whose colors is transparent."""
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in {
        b"IHDR": struct.pack(">IIBBBBB", 4, 1, bits, color, 0, 0, 0),
        b"tRNS": transparent,
        b"IDAT": zlib.compress(b"\0" + pixels),
        b"IEND": b"",
    }.items():
        content += struct.pack(">I", len(data)) + name + data
        content += struct.pack(">I", zlib.crc32(name + data))
    return io.BytesIO(content)


@pytest.mark.parametrize(
    ("bits", "pixels", "transparent", "expected"),
    [
        (1, b"\xa0", b"\0\0", [255, 255, 255, 255]),
        (1, b"\xa0", b"\0\1", [255, 0, 255, 0]),
        (2, b"\x1b", b"\0\1", [0, 255, 170, 255]),
        (4, b"\x12\x3f", b"\0\3", [17, 34, 255, 255]),
        (8, b"\1\2\3\x11", b"\0\3", [1, 2, 255, 17]),
        (16, b"\1\0\1\2\1\1\x20\0", b"\1\1", [1, 1, 255, 32]),
    ],
)
def test_a_transparent_gray_value(
    bits: int, pixels: bytes, transparent: bytes, expected: list[int]
) -> None:
    assert read(png(bits, 0, pixels, transparent))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("bits", [8, 16])
def test_a_transparent_color(bits: int) -> None:
    colors = np.array([[9, 8, 7], [200, 0, 0], [9, 8, 6], [0, 0, 0]], f">u{bits // 8}")
    if bits == 16:
        colors = (colors * 256 + 17).astype(">u2")
    transparent = colors[1].astype(">u2").tobytes()
    found = read(png(bits, 2, colors.tobytes(), transparent))[0]
    assert found.tolist() == [[9, 8, 7], [255, 255, 255], [9, 8, 6], [0, 0, 0]]


@pytest.mark.parametrize("transparency", [1, b"\xff\0\x80"])
def test_a_transparent_color_of_a_palette(transparency: int | bytes) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 200, 0, 0, 50, 150, 251])
    image.putdata([0, 1, 2])
    found = read(save(image, "PNG", transparency=transparency))[0]
    last = [50, 150, 251] if transparency == 1 else [152, 202, 253]
    np.testing.assert_allclose(found, [[10, 20, 30], [255, 255, 255], last], atol=1)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_the_first_picture_of_several(kind: str) -> None:
    first, second = Image.new("RGB", (20, 10), "lime"), Image.new("RGB", (20, 10), "red")
    options = {"save_all": True, "append_images": [second], **OPTIONS.get(kind, {})}
    assert (read(save(first, kind, **options)) == (0, 255, 0)).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_a_file_that_is_cut_off(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    content = save(Image.fromarray(noise), kind).getvalue()
    with pytest.raises(OSError):
        read(io.BytesIO(content[: len(content) * 3 // 4]))


@pytest.mark.parametrize("kind", [kind for kind in WRITTEN if kind != "HEIF"])
def test_a_damaged_byte_is_noticed_where_pillow_notices_it(kind: str) -> None:
    if kind == "AVIF" and kind not in pictures.FORMATS:
        pytest.skip("this Pillow reads no AVIF")
    colors = (RAMP[..., None] * (255, 200, 150)).astype(np.uint8)
    options = {"compression": "tiff_lzw"} if kind == "TIFF" else {}
    file = io.BytesIO()  # without EXIF, which Pillow then searches for behind the pixels
    Image.fromarray(colors).save(file, kind, **options)
    content = file.getvalue()
    n_refused = 0
    for at in range(0, len(content), max(1, len(content) // 40)):
        damaged = content[:at] + bytes([content[at] ^ 0x5A]) + content[at + 1 :]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                Image.open(io.BytesIO(damaged), formats=pictures.FORMATS).load()
            except Exception:  # of many kinds
                n_refused += 1
                with pytest.raises(Exception):  # noqa: B017
                    read(io.BytesIO(damaged))
    assert n_refused


def test_what_is_raised_names_the_path(tmp_path: Any) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.png")
    content = save(Image.fromarray(KNOWN), "PNG").getvalue()
    path.write_bytes(content[: len(content) - 40])
    with pytest.raises(ValueError) as caught, pictures.open_picture(path) as picture:
        picture.rgb()
    assert str(caught.value).startswith(f"'{tmp_path}/caf\\udce9.png': OSError: ")
    path.write_bytes(b"text")
    with pytest.raises(ValueError) as caught, pictures.open_picture(path):
        pass
    assert str(caught.value).startswith(f"'{tmp_path}/caf\\udce9.png': expected a picture in one")


def exif_of(orientation: int, kind: int, number: bytes) -> bytes:
    """Return a block of EXIF with an orientation and an x resolution."""
    entries = struct.pack("<HHIHH", ExifTags.Base.Orientation, 3, 1, orientation, 0)
    entries += struct.pack("<HHII", ExifTags.Base.XResolution, kind, 1, 38)
    return b"Exif\0\0II*\0\x08\0\0\0\2\0" + entries + bytes(4) + number


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("kind_of_number", "number"),
    [
        (10, struct.pack("<ii", -1, 3)),
        (5, struct.pack("<II", 5, 0)),
        (12, struct.pack("<d", np.nan)),
    ],
)
def test_an_odd_number_in_exif(kind: str, kind_of_number: int, number: bytes) -> None:
    image = Image.new("RGB", (20, 10), "white")
    image.paste("black", (0, 0, 10, 10))
    file = io.BytesIO()
    image.save(file, kind, exif=exif_of(6, kind_of_number, number))
    pixels = read(file)
    assert pixels.shape == (20, 10, 3)
    assert pixels[:8].max() < 10 and pixels[12:].min() > 245


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0?"])
def test_a_broken_block_of_exif_says_nothing(exif: bytes) -> None:
    file = io.BytesIO()
    Image.new("RGB", (20, 10)).save(file, "PNG", exif=exif)
    assert read(file).shape == (10, 20, 3)


def test_nobody_is_warned_of_broken_exif_without_the_name_of_the_file() -> None:
    file = io.BytesIO()
    Image.new("RGB", (20, 10)).save(file, "JPEG", exif=exif_of(6, 5, b""))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        importlib.reload(pictures)
        read(file)
    assert not warned


def test_orientation_in_xmp_of_tiff() -> None:
    xmp = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'><a tiff:Orientation=\"6\"/></x:xmpmeta>"
    file = io.BytesIO()
    in_mode(STORED[6](KNOWN), "RGB").save(file, "TIFF", tiffinfo={700: xmp})
    np.testing.assert_array_equal(read(file), seen(KNOWN, "RGB"))


@pytest.mark.parametrize("orientation", [1, 6])
def test_jpeg_is_decoded_only_as_large_as_needed(orientation: int) -> None:
    large = KNOWN.repeat(10, 0).repeat(10, 1)
    file = save(in_mode(STORED[orientation](large), "RGB"), "JPEG", orientation)
    found = read(file, at_least=(WIDTH * 2, HEIGHT * 2))
    assert found.shape == (HEIGHT * 10 // 4, WIDTH * 10 // 4, 3)
    middles = found[20::40, 20::40]
    np.testing.assert_allclose(middles, seen(KNOWN, "RGB")[8::16, 8::16], atol=8)


@pytest.mark.parametrize("kind", ["EPS", "SGI", "TGA", "PCX", None])
def test_other_formats_are_refused(kind: str | None) -> None:
    file = io.BytesIO()
    if kind:
        Image.new("RGB", (9, 9)).save(file, kind)
    start = file.getvalue()[:4].hex(" ") or "an empty file"
    message = f"PNG, PPM, TIFF, WEBP, of a kind that Pillow reads, got {start} .*; save it as PNG"
    with pytest.raises(ValueError, match=message):
        read(file)


def test_heif_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert pictures.hint(".HEIC") == "'pip install pillow-heif' makes them readable"
    assert ".heic" not in pictures.endings()
    with pytest.raises(ValueError, match="'pip install pillow-heif' makes them readable"):
        read(io.BytesIO(b"\0\0\0\x18ftypheic" + bytes(20)))


def test_heif_is_read_whatever_it_is_called(tmp_path: Any) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    assert {".heic", ".heif"} < pictures.endings() and pictures.hint(".heic") == ""
    path = tmp_path / "IMG_0001.jpg"
    pillow_heif.from_pillow(Image.new("RGB", (64, 48), "lime")).save(path)
    with pictures.open_picture(path) as picture:
        np.testing.assert_allclose(picture.rgb().getpixel((9, 9)), (0, 255, 0), atol=4)
