"""Training images of one size, without labels."""

import gzip
import io
import warnings
import zlib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from PIL import Image, ImageOps

from chainermn.datasets.folders import find_files
from chainermn.datasets.names import shown
from chainermn.files import open_regular, read_bytes
from chainermn.progress import Progress

IDX_FILES = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"
HELD_OUT = 0.1  # share of the files in a folder
FEWEST_FILES = 100
MOST_BYTES = 1 << 30  # of a file and of its unpacked content; MNIST's largest has 47 million

# The only formats to read, whatever a file is called. Pillow knows many more, and runs other
# programs for some of them.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# Pixels that an image may have; a file of a few bytes can claim billions.
MOST_PIXELS = 128_000_000
# Pillow warns of images larger than this, and refuses images twice as large.
Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def load(dataset: str, directory: str | None, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the training images, and images to compare generated ones with.

    Parameters
    ----------
    dataset : {'digits', 'mnist', 'images'}
        ``digits`` comes with scikit-learn: 1437 and 360 images of 8x8 pixels. ``mnist`` is read
        from two IDX files of MNIST or of a set like it. ``images`` are image files in a folder and
        below it; one in ten is held out.
    directory : path or None
        Folder of ``mnist`` or ``images``.
    size : int
        Height and width to which ``images`` are scaled, after cropping each to its middle.

    Returns
    -------
    train, validation : array of uint8, shape (n, channels, size, size)

    Raises
    ------
    OSError, ValueError
        If the folder lacks a file, a file is not what its name says, there are too few images, or
        a folder is missing, or given where none is needed.
    """
    if (dataset == "digits") == bool(directory):
        expected = "takes no folder" if dataset == "digits" else "needs a folder"
        raise ValueError(f"--dataset {dataset} {expected}; got --data {directory}")
    if dataset == "digits":
        return _load_digits()
    if dataset == "mnist":
        train, validation = (_load_idx(Path(directory), name) for name in IDX_FILES)
        if train.shape[1:] != validation.shape[1:]:
            raise ValueError(
                f"{directory}: the images of the two files must have the same size, got "
                f"{train.shape[2:]} and {validation.shape[2:]}"
            )
        return train, validation
    return _load_files(Path(directory), size)


@chainer.dataset.converter()
def to_pixels(images: list[np.ndarray], device: chainer.backend.Device) -> Any:
    """Return a batch for the networks: from -1 for black to 1 for white, on a device."""
    return device.send(np.stack(images).astype(chainer.get_dtype()) / 127.5 - 1)


def digest(images: np.ndarray) -> str:
    """Return a digest of images."""
    return f"{zlib.crc32(images):08x}"


def read_idx(content: bytes, name: str) -> np.ndarray:
    """Decode a file of images in MNIST's format, IDX, gzipped or not.

    Returns
    -------
    array of uint8, shape (n, 1, size, size)

    Raises
    ------
    ValueError
        If it is something else, has been cut off, or its images are not square. The message
        begins with ``name``.
    """
    packed = io.BytesIO(content)
    file = gzip.GzipFile(fileobj=packed) if content.startswith(b"\x1f\x8b") else packed
    try:
        header = file.read(16)
        if header[:4] != b"\0\0\x08\x03":
            raise ValueError(
                f"{name}: expected an IDX file of images, which starts with 00 00 08 03, got "
                f"{header[:4].hex(' ') or 'nothing'}"
            )
        n, height, width = (int.from_bytes(header[i : i + 4], "big") for i in (4, 8, 12))
        size = n * height * width
        # Read at most what the header says: a small file may unpack to gigabytes.
        pixels = file.read(min(size, MOST_BYTES) + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}: damaged gzip file ({error})") from None
    if not 0 < size <= MOST_BYTES or len(pixels) != size or height != width:
        found = f"{'at least ' if len(pixels) > size else ''}{len(header) + len(pixels)}"
        raise ValueError(
            f"{name}: expected square images, got {found} bytes for {n} of {height}x{width} pixels"
        )
    return np.frombuffer(pixels, np.uint8).reshape(n, 1, height, width)


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    # Like sklearn.datasets.load_digits, without the half second that its import takes.
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    pixels = np.loadtxt(path, delimiter=",")[:, :-1].reshape(-1, 8, 8)
    order = np.random.RandomState(0).permutation(len(pixels))
    images = np.rint(pixels[order, None] * (255 / 16)).astype(np.uint8)
    return images[:1437], images[1437:]


def _load_idx(directory: Path, name: str) -> np.ndarray:
    candidates = [directory / name, directory / f"{name}.gz"]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{directory.resolve()} contains neither {name} nor {name}.gz")
    return read_idx(read_bytes(found, MOST_BYTES), str(found))


def _load_files(directory: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    endings = {e for e, name in Image.registered_extensions().items() if name in FORMATS}
    found = find_files(directory, endings)
    paths, left_out = list(map(Path, found.files)), found.left_out()
    if len(paths) < FEWEST_FILES:
        raise ValueError(
            f"expected at least {FEWEST_FILES} image files in {directory.resolve()} and its "
            f"folders, got {'; '.join([str(len(paths)), *left_out])}"
        )
    print("\n".join([f"{len(paths)} images in {shown(directory)}", *left_out]), flush=True)
    images = np.empty((len(paths), 3, size, size), np.uint8)
    progress = Progress(len(paths), "reading images")
    for pixels, path in zip(images, paths, strict=True):
        pixels[...] = _read(path, size)
        progress.step()
    images = images[np.random.RandomState(0).permutation(len(images))]
    n_held_out = round(HELD_OUT * len(images))
    return images[n_held_out:], images[:n_held_out]


def _read(path: Path, size: int) -> np.ndarray:
    try:
        with open_regular(path, MOST_BYTES) as file, Image.open(file, formats=FORMATS) as image:
            ImageOps.exif_transpose(image, in_place=True)
            upright = image.convert("RGB")
    except Exception as error:  # Pillow's decoders each have their own
        raise ValueError(
            f"{path} cannot be read as an image ({type(error).__name__}: {error})"
        ) from None
    fitted = ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(fitted).transpose(2, 0, 1)
