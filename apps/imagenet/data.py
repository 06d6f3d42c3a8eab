"""Labeled image files: the examples made from lists of them, and batches."""

import math
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import chainer
import numpy as np
from chainer.dataset import DatasetMixin

import chainermn
import images
from chainermn.datasets.names import shown
from chainermn.files import open_regular, read_json
from chainermn.global_except_hook import exit_job
from chainermn.iterators import MultiprocessIterator
from lists import ImageList

# Share of a validation image's side that is cropped from its middle: 224 of 256 pixels.
CENTER = 0.875

LARGEST_MEAN = 1 << 26  # bytes of a file; that of Chainer's example has less than a million


@dataclass
class Unreadable:
    """A dataset's replacement for an example that it cannot read."""

    path: str
    reason: str
    size: int  # that its image would have


class Images(DatasetMixin):
    """Examples, made from image files on access.

    An example is a pair of an image, uint8 of shape (3, size, size), and its class, int32. If the
    image cannot be read, the example is `Unreadable`: an exception would get lost in a worker.

    Parameters
    ----------
    listed : ImageList
    root : path
        Folder that the paths of the list start from.
    size : int
        Height and width of the examples.
    seed : int, optional
        Seed of random crops and flips. By default, the middle is used as it is.
    least : float
        Smallest share of an image's area in a random crop.
    """

    def __init__(
        self,
        listed: ImageList,
        root: str | Path,
        size: int,
        seed: int | None = None,
        least: float = 0.08,
    ) -> None:
        self.listed = listed
        self.root = Path(root).resolve()
        self.size = size
        self.seed = seed
        self.least = least

    def __len__(self) -> int:
        return len(self.listed)

    def get_example(self, i: int) -> tuple[np.ndarray, np.ndarray] | Unreadable:
        """Return example ``i % len(self)``, cropped for epoch ``i // len(self)``.

        So the same ``i`` is always the same example, whichever worker makes it, and also in a
        run that has been resumed.
        """
        n = i % len(self)
        path, label = self.listed[n]
        file, where = self.root / path, self.listed.where(n)
        name = f"{shown(file)} ({where})" if where else shown(file)
        root = self.root if self.listed.confined else None
        return make_example(file, name, label, i, self.size, self.seed, self.least, root)

    @property
    def example_bytes(self) -> int:
        """Bytes of the arrays of an example."""
        return 3 * self.size**2 + np.dtype(np.int32).itemsize


def make_example(
    file: str | Path | BinaryIO,
    name: str,
    label: int,
    number: int,
    size: int,
    seed: int | None = None,
    least: float = 0.08,
    root: Path | None = None,
) -> tuple[np.ndarray, np.ndarray] | Unreadable:
    """Return an example; see `Images`. It depends only on the arguments."""
    random = None if seed is None else np.random.default_rng([seed, number])
    if random is None:
        choose = partial(images.center_box, share=CENTER)
    else:
        choose = partial(images.random_box, random=random, least=least)
    try:
        image = images.read_image(file, size, choose, root)
    except Exception as error:  # Pillow's decoders raise all kinds of exceptions
        return Unreadable(name, f"{type(error).__name__}: {error}", size)
    if random is not None and random.random() < 0.5:
        image = np.ascontiguousarray(image[:, :, ::-1])
    return image, np.array(label, np.int32)


class EpochOrder(chainer.iterators.OrderSampler):
    """Orders that also tell `Images` the epoch: ``i + epoch * len(images)``.

    Parameters
    ----------
    sampler : chainermn.datasets.DistributedOrderSampler
        Reshuffles the images of all ranks for each epoch.
    """

    def __init__(self, sampler: chainermn.datasets.DistributedOrderSampler) -> None:
        self.sampler = sampler

    def __call__(self, current_order: np.ndarray, current_position: int) -> np.ndarray:
        """Return the next order, when one of Chainer's iterators asks for it."""
        n = self.sampler.n
        order = self.sampler(current_order % n, current_position)
        return order + n * (self.sampler.epoch - 1)

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch, counted from 0."""
        return self.sampler.order(epoch) + self.sampler.n * epoch


def create_iterator(
    images: Images, batch_size: int, n_workers: int, **order: object
) -> chainer.dataset.Iterator:
    """Return an iterator whose workers read ahead; without workers, one that reads by itself."""
    if n_workers == 0:
        return chainer.iterators.SerialIterator(images, batch_size, **order)
    return MultiprocessIterator(
        images,
        batch_size,
        n_processes=n_workers,
        n_prefetch=4,
        shared_mem=images.example_bytes,
        dataset_timeout=300,
        **order,
    )


class ToBatch(chainer.dataset.Converter):
    """Convert examples of `Images` to the arrays of a batch.

    Parameters
    ----------
    mean, deviation : array
        Values to subtract from red, green and blue, and to divide these by.
    skip : bool
        Whether to leave out files that cannot be read.

    Attributes
    ----------
    skipped : dict of str
        What is wrong with files that were left out, by their names.
    """

    def __init__(self, mean: np.ndarray, deviation: np.ndarray, skip: bool = False) -> None:
        self.mean = np.asarray(mean, np.float32)[:, None, None]
        self.scale = 1 / np.asarray(deviation, np.float32)[:, None, None]
        self.skip = skip
        self.skipped: dict[str, str] = {}

    def __call__(self, batch: list, device: chainer.backend.Device | None = None) -> tuple:
        """Return images, of ``chainer.config.dtype``, and classes.

        Ends the job if a file cannot be read, unless such files are skipped.
        """
        readable = [example for example in batch if not isinstance(example, Unreadable)]
        if len(readable) < len(batch):
            self._leave_out([example for example in batch if isinstance(example, Unreadable)])
        size = batch[0].size if isinstance(batch[0], Unreadable) else batch[0][0].shape[-1]
        pixels = np.empty((len(readable), 3, size, size), np.uint8)
        for place, (image, _) in zip(pixels, readable, strict=True):
            place[...] = image
        t = np.array([label for _, label in readable], np.int32)
        mean, scale = self.mean, self.scale
        if device is not None:  # a GPU does the rest, with a quarter of the bytes to copy
            pixels, t, mean, scale = (device.send(each) for each in (pixels, t, mean, scale))
        x = chainer.backend.get_array_module(pixels).empty(pixels.shape, np.float32)
        # A single image stays in the cache of a CPU.
        on_cpu = isinstance(x, np.ndarray)
        for part, image in zip(x, pixels, strict=True) if on_cpu else [(x, pixels)]:
            part[...] = image
            part -= mean
            part *= scale
        return x.astype(chainer.get_dtype(map_mixed16=np.float16), copy=False), t

    def _leave_out(self, unreadable: list[Unreadable]) -> None:
        for file in unreadable:
            message = f"cannot read {file.path} on {socket.gethostname()} ({file.reason})"
            if not self.skip:
                exit_job(f"{message}. --skip-unreadable continues without such files")
            # A new one, as a thread may call this while another reads the old one.
            self.skipped = {**self.skipped, file.path: message}


def read_statistics(path: Path) -> dict[str, list[float]]:
    """Return ``mean`` and ``deviation`` of red, green and blue.

    Parameters
    ----------
    path : path
        File from prepare.py; or, if it ends with ``.npy``, the mean of images from 0 to 255, of
        shape (3, height, width), as Chainer's ImageNet example takes it. Then only the mean of
        each color is used, and the deviation is 255, since that example divides by it.

    Raises
    ------
    OSError, ValueError
    """
    if path.suffix != ".npy":
        numbers = (float,) * 3
        found = read_json(path, {"mean": numbers, "deviation": numbers})
        if min(found["deviation"]) <= 0:
            raise ValueError(
                f"{path}: expected deviations above 0, got {found['deviation']}: a color that is "
                "the same everywhere needs 1, which prepare.py writes: run it again"
            )
        return {name: found[name] for name in ("mean", "deviation")}
    open_regular(path, LARGEST_MEAN).close()
    try:
        # A memory map takes no memory before it is used.
        image = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy's reader of headers raises all kinds of exceptions
        raise ValueError(f"{path}: expected an array in NumPy's format ({error})") from None
    if image.ndim != 3 or len(image) != 3 or image.dtype.kind not in "fiu":
        found = f"{image.dtype} of shape {image.shape}"
        raise ValueError(f"{path}: expected numbers of shape (3, height, width), got {found}")
    means = image.mean(axis=(1, 2), dtype=np.float64).tolist()
    if not all(0 <= mean <= 255 for mean in means):
        raise ValueError(f"{path}: expected means from 0 to 255, got {means}")
    return {"mean": means, "deviation": [255.0] * 3}


class Sums:
    """Sums over the pixels of images, in integers, so they are exact in any order."""

    def __init__(self) -> None:
        self.pixels = 0
        self.sums = np.zeros((2, 3), np.int64)

    def add(self, image: np.ndarray) -> None:
        """Add an image, uint8 of shape (3, height, width)."""
        values = image.reshape(3, -1).astype(np.int64)
        self.pixels += values.shape[1]
        self.sums += np.array([values.sum(axis=1), (values**2).sum(axis=1)])

    def __add__(self, other: "Sums") -> "Sums":
        total = Sums()
        total.pixels = self.pixels + other.pixels
        total.sums = self.sums + other.sums
        return total

    def statistics(self) -> dict[str, list[float]]:
        """Return mean and standard deviation of red, green and blue; 1 for no deviation."""
        mean = (self.sums[0] / self.pixels).tolist()
        deviation = [
            math.sqrt(self.pixels * squares - total**2) / self.pixels
            for total, squares in self.sums.T.tolist()
        ]
        # Or dividing by it would spoil the training.
        return {"mean": mean, "deviation": [value or 1.0 for value in deviation]}
