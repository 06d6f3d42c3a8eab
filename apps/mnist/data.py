"""Images of handwritten digits, with labels."""

import gzip
import hashlib
import io
import math
import urllib.error
import urllib.request
import zlib
from http.client import HTTPException
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from chainer.dataset import cache_or_load_file, get_dataset_directory
from chainer.datasets import TupleDataset

from chainermn.files import open_regular, read_bytes

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MOST_BYTES = 1 << 30  # of a file and of its unpacked content; MNIST's largest has 47 million
IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
# Of the gzipped files; any other content is refused.
SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
LARGEST = 9_912_422  # bytes of the largest of them

Raw = dict[str, np.ndarray]  # as in Chainer's cache: images "x" (n, pixels), labels "y" (n,)


def load(dataset: str, directory: str | None = None) -> tuple[TupleDataset, TupleDataset]:
    """Return training and validation examples.

    Parameters
    ----------
    dataset : {'digits', 'mnist'}
        ``digits`` comes with scikit-learn: 1437 and 360 images of 8x8 pixels. ``mnist`` has
        60000 and 10000 of 28x28 pixels; it is taken from Chainer's cache, into which it is
        downloaded the first time.
    directory : path, optional
        Take ``mnist`` from the four IDX files in this folder, gzipped or not, instead.

    Returns
    -------
    train, validation : chainer.datasets.TupleDataset
        Pairs of an image, float32 of shape (pixels,) from 0 to 1, and its digit, int32.

    Raises
    ------
    FileNotFoundError
        If ``directory`` lacks one of the files.
    ValueError
        If a file is not what its name says, the name of the data set is unknown, or there is a
        directory for ``digits``.
    ConnectionError
        If MNIST cannot be downloaded.
    """
    if dataset == "digits":
        if directory:
            raise ValueError(f"{directory}: only --dataset mnist is read from a folder")
        return _load_digits()
    if dataset == "mnist":
        if not directory:
            train, test = _load_cached("train"), _load_cached("test")
        else:
            train, test = _load_idx("train", directory), _load_idx("test", directory)
        return _scaled(train, 255), _scaled(test, 255)
    raise ValueError(f"unknown data set {dataset!r}; expected 'digits' or 'mnist'")


def read_idx(content: bytes, ndim: int, name: str) -> np.ndarray:
    """Decode a file in IDX, MNIST's format.

    Parameters
    ----------
    content : bytes
        Content of the whole file, gzipped or not.
    ndim : int
        Required number of dimensions.
    name : str
        Name for error messages.

    Returns
    -------
    array of uint8
        Read-only.

    Raises
    ------
    ValueError
        If it has another format, or is truncated.
    """
    packed = io.BytesIO(content)
    file = gzip.GzipFile(fileobj=packed) if content.startswith(b"\x1f\x8b") else packed
    magic = bytes([0, 0, 8, ndim])
    try:
        header = file.read(4 + 4 * ndim)
        if header[:4] != magic:
            raise ValueError(
                f"{name}: expected an IDX file that starts with {magic.hex(' ')} "
                f"({ndim} dimensions of unsigned bytes), got {header[:4].hex(' ') or 'nothing'}"
            )
        shape = [int.from_bytes(header[i : i + 4], "big") for i in range(4, 4 + 4 * ndim, 4)]
        size = math.prod(shape)
        # Read at most what the header says: a small file may unpack to gigabytes.
        pixels = file.read(min(size, MOST_BYTES) + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}: damaged gzip file ({error})") from None
    if len(header) < 4 + 4 * ndim or len(pixels) != size or size > MOST_BYTES:
        found = len(header) + len(pixels)
        raise ValueError(
            f"{name}: expected {4 + 4 * ndim + size} bytes for an array of shape {tuple(shape)}, "
            f"got {'at least ' if len(pixels) > size else ''}{found}"
        )
    return np.frombuffer(pixels, np.uint8).reshape(shape)


def _load_digits() -> tuple[TupleDataset, TupleDataset]:
    # Like sklearn.datasets.load_digits, without the half second that its import takes.
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(path, delimiter=",")
    pixels, labels = table[:, :-1], table[:, -1]
    order = np.random.RandomState(0).permutation(len(labels))
    train, validation = order[:1437], order[1437:]
    return (
        _scaled({"x": pixels[train], "y": labels[train]}, 16),
        _scaled({"x": pixels[validation], "y": labels[validation]}, 16),
    )


def _scaled(raw: Raw, white: int) -> TupleDataset:
    return TupleDataset(raw["x"].astype(np.float32) / white, raw["y"].astype(np.int32))


def _load_idx(part: str, directory: str) -> Raw:
    contents = []
    for name in IDX_FILES[part]:
        candidates = [Path(directory, name), Path(directory, f"{name}.gz")]
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            raise FileNotFoundError(
                f"{Path(directory).resolve()} contains neither {name} nor {name}.gz"
            )
        contents.append((read_bytes(found, MOST_BYTES), str(found)))
    return _decode(*contents)


def _decode(images: tuple[bytes, str], labels: tuple[bytes, str]) -> Raw:
    x, y = read_idx(images[0], 3, images[1]), read_idx(labels[0], 1, labels[1])
    if len(x) != len(y):
        raise ValueError(f"{images[1]} has {len(x)} images, but {labels[1]} has {len(y)} labels")
    if y.max(initial=0) > 9:
        raise ValueError(f"{labels[1]}: expected digits, got the label {y.max()}")
    return {"x": x.reshape(len(x), -1), "y": y}


def _load_cached(part: str) -> Raw:
    def create(path: str) -> Raw:
        raw = _download(part)
        np.savez_compressed(path, **raw)
        return raw

    path = Path(get_dataset_directory("pfnet/chainer/mnist"), f"{part}.npz")
    return cache_or_load_file(str(path), create, _read_cache)


def _read_cache(path: str) -> Raw:
    """Return the content of a file of the cache, which may come from elsewhere."""
    try:
        with open_regular(path) as file, np.load(file) as arrays:
            if sum(member.file_size for member in arrays.zip.infolist()) > MOST_BYTES:
                raise ValueError(f"expected at most {MOST_BYTES} bytes")
            x, y = arrays["x"], arrays["y"]
        if (x.dtype, x.ndim, y.dtype, y.ndim) != (np.uint8, 2, np.uint8, 1):
            raise ValueError(
                f"expected unsigned bytes, got {x.dtype} {x.shape}, {y.dtype} {y.shape}"
            )
        if len(x) != len(y) or y.max(initial=0) > 9:
            raise ValueError(f"expected {len(x)} digits, got {len(y)} labels up to {y.max()}")
    except Exception as error:  # zipfile and NumPy each have their own
        raise ValueError(
            f"{path} is damaged: delete it to have it made again ({type(error).__name__}: {error})"
        ) from None
    return {"x": x, "y": y}


def _download(part: str) -> Raw:
    failures = []
    for mirror in MIRRORS:
        try:
            contents = []
            for name in IDX_FILES[part]:
                url = f"{mirror}{name}.gz"
                print("downloading", url, flush=True)
                # All URLs begin as MIRRORS says.
                with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
                    content = response.read(LARGEST + 1)
                digest = hashlib.sha256(content).hexdigest()
                if digest != SHA256[name]:
                    raise ValueError(f"{name}.gz: expected SHA-256 {SHA256[name]}, got {digest}")
                contents.append((content, url))
            return _decode(*contents)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection
            failures.append(f"  {mirror}: {error}")
    raise ConnectionError(
        "MNIST could not be downloaded:\n" + "\n".join(failures) + "\n"
        "Two ways without a network: give --data DIR, a folder with the files\n  "
        + ", ".join(f"{name}.gz" for names in IDX_FILES.values() for name in names)
        + "\n(or the same unpacked); or copy train.npz and test.npz of Chainer's cache from "
        f"another machine\nto {get_dataset_directory('pfnet/chainer/mnist')}."
    )
