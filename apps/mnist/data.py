"""Images of handwritten digits, with labels."""

import argparse
import hashlib
import tempfile
import urllib.error
import urllib.request
import zlib
from http.client import HTTPException
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from chainer.dataset import cache_or_load_file, get_dataset_directory
from chainer.datasets import TupleDataset

from chainermn.datasets import idx
from chainermn.datasets.names import check_labels
from chainermn.datasets.overview import show_classes
from chainermn.files import open_regular
from model import MODELS, load_weights

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MOST_BYTES = 1 << 30  # of a file of the cache, unpacked; MNIST's larger one has 47 million
PARTS = {"train": "train", "test": "t10k"}
DATASETS = ("digits", "mnist")
CLASSES = list("0123456789")
# Of the gzipped files; any other content is refused.
SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
LARGEST = 9_912_422  # bytes of the largest of them

Labeled = tuple[np.ndarray, np.ndarray]  # images of shape (n, height, width), digits (n,)


def load(dataset: str, directory: str | None = None) -> tuple[TupleDataset, TupleDataset]:
    """Return training and validation examples.

    Parameters
    ----------
    dataset : {'digits', 'mnist'}
        ``digits`` comes with scikit-learn: 1437 and 360 images of 8x8 pixels. ``mnist`` has
        60000 and 10000 of 28x28 pixels; it is taken from Chainer's cache, into which it is
        downloaded the first time.
    directory : path, optional
        Take ``mnist`` from the four IDX files in this folder instead; images may have any size.

    Returns
    -------
    train, validation : chainer.datasets.TupleDataset
        Pairs of an image, float32 of shape (height, width) from 0 to 1, and its digit, int32.

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
        if directory:
            parts = idx.read_data_set(directory)
            for part, (_, labels) in zip(PARTS.values(), parts, strict=True):
                source = idx.find(directory, f"{part}-labels-idx1-ubyte")
                check_labels(labels, CLASSES, source, several=part == "train")
        else:
            parts = _load_cached("train"), _load_cached("test")
        return tuple(_scaled(*part, 255) for part in parts)
    raise ValueError(f"unknown data set {dataset!r}; expected 'digits' or 'mnist'")


def load_shown(args: argparse.Namespace) -> tuple[TupleDataset, TupleDataset]:
    """Load as the options say; check that the network to evaluate fits, or show each digit."""
    train, validation = load(args.dataset, args.data)
    if args.evaluate:
        network = MODELS[getattr(args, "model", "mlp")](args.unit, len(CLASSES))
        network(train[0][0][None])  # so that weights for images of another size do not fit
        load_weights(Path(args.out, "best.npz"), network)
    else:
        labels = {"train": [digit for _, digit in train], "validate": [d for _, d in validation]}
        show_classes(args.out, CLASSES, labels, lambda i: train[i][0])
    return train, validation


def digest(examples: TupleDataset) -> str:
    """Return a digest of images and their digits."""
    found = 0
    for image, digit in examples:
        found = zlib.crc32(image.tobytes() + digit.tobytes(), found)
    return f"{found:08x}"


def _load_digits() -> tuple[TupleDataset, TupleDataset]:
    # Like sklearn.datasets.load_digits, without the half second that its import takes.
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(path, delimiter=",")
    pixels, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    order = np.random.RandomState(0).permutation(len(labels))
    train, validation = order[:1437], order[1437:]
    return (
        _scaled(pixels[train], labels[train], 16),
        _scaled(pixels[validation], labels[validation], 16),
    )


def _scaled(images: np.ndarray, labels: np.ndarray, white: int) -> TupleDataset:
    return TupleDataset(images.astype(np.float32) / white, labels.astype(np.int32))


def _load_cached(part: str) -> Labeled:
    def create(path: str) -> dict[str, np.ndarray]:
        images, labels = _download(PARTS[part])
        raw = {"x": images.reshape(len(images), -1), "y": labels}
        np.savez_compressed(path, **raw)
        return raw

    path = Path(get_dataset_directory("pfnet/chainer/mnist"), f"{part}.npz")
    raw = cache_or_load_file(str(path), create, _read_cache)
    return raw["x"].reshape(-1, 28, 28), raw["y"]


def _read_cache(path: str) -> dict[str, np.ndarray]:
    """Return the content of a file of the cache, which may come from elsewhere."""
    try:
        with open_regular(path) as file, np.load(file) as arrays:
            if sum(member.file_size for member in arrays.zip.infolist()) > MOST_BYTES:
                raise ValueError(f"expected at most {MOST_BYTES} bytes")
            x, y = arrays["x"], arrays["y"]
        if (x.dtype, x.shape[1:], y.dtype, y.ndim) != (np.uint8, (784,), np.uint8, 1):
            raise ValueError(
                f"expected unsigned bytes, 784 for an image, got {x.dtype} {x.shape}, "
                f"{y.dtype} {y.shape}"
            )
        if len(x) != len(y) or y.max(initial=0) > 9:
            raise ValueError(f"expected {len(x)} digits, got {len(y)} labels up to {y.max()}")
    except Exception as error:  # zipfile and NumPy each have their own
        raise ValueError(
            f"{path} is damaged: delete it to have it made again ({type(error).__name__}: {error})"
        ) from None
    return {"x": x, "y": y}


def _download(part: str) -> Labeled:
    names = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    failures = []
    for mirror in MIRRORS:
        try:
            with tempfile.TemporaryDirectory() as folder:
                for name in names:
                    url = f"{mirror}{name}.gz"
                    print("downloading", url, flush=True)
                    # All URLs begin as MIRRORS says.
                    with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
                        content = response.read(LARGEST + 1)
                    digest = hashlib.sha256(content).hexdigest()
                    if digest != SHA256[name]:
                        raise ValueError(
                            f"{name}.gz: expected SHA-256 {SHA256[name]}, got {digest}"
                        )
                    Path(folder, name).write_bytes(content)
                return idx.read_part(folder, part)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection
            failures.append(f"  {mirror}: {error}")
    raise ConnectionError(
        "MNIST could not be downloaded:\n" + "\n".join(failures) + "\n"
        "Two ways without a network: give --data DIR, a folder with the files\n  "
        + ", ".join(f"{name}.gz" for name in SHA256)
        + "\n(or the same unpacked); or copy train.npz and test.npz of Chainer's cache from "
        f"another machine\nto {get_dataset_directory('pfnet/chainer/mnist')}."
    )
