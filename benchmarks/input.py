"""How fast apps/imagenet reads images, compared with PyTorch's DataLoader on the same files.

Both read files with the same function of the app, which decodes and crops as in training. Both use
as many worker processes, and return batches that are ready for the network.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from benchmarks.figures import Group, Measured
from benchmarks.harness import REPOSITORY, Settings, why_no_torch
from chainermn.iterators import start_forkserver
from chainermn.process.memory import keep_freed_memory

PIXELS, CROP = (500, 375), 224
BATCHSIZE = 32
FILES = 640
WORKERS = (1, 2)
PREFETCH = 4  # batches that each worker of PyTorch reads ahead, or all workers of Chainer together
MEAN, DEVIATION = np.array([124, 116, 104]), np.array([58, 57, 57])

Batches: TypeAlias = Generator[np.ndarray, None, None]


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and for anything that could not be measured, the reason."""
    sys.path.insert(0, str(REPOSITORY / "apps/imagenet"))
    import data

    start_forkserver()
    keep_freed_memory()  # as create_communicator does in training
    loaders: dict[str, Callable[[Any, int], Batches]] = {"ours": with_chainer}
    if not why_no_torch():
        loaders["PyTorch DataLoader"] = with_torch
    with tempfile.TemporaryDirectory() as folder:
        n_files = FILES // 10 if settings.quick else FILES
        names = draw_files(Path(folder), n_files)
        images = data.Images(data.ImageList(*zip(*names, strict=True)), folder, CROP, seed=0)
        settings.tell("decoding alone")
        alone = statistics.median(decode_alone(images) for _ in range(settings.rounds))
        for n_workers in WORKERS:
            title = f"{n_workers} worker{'s' * (n_workers > 1)}"
            streams = {name: load(images, n_workers) for name, load in loaders.items()}
            rows = in_turn(streams, n_workers, n_files // BATCHSIZE, settings)
            group = Group(title, {"workers": str(n_workers)}, rows, "PyTorch DataLoader")
            group.reference = BATCHSIZE * alone / n_workers
            group.reference_is = "decoding and cropping in one process, divided by the workers"
            yield group
    yield from why_no_torch()


def in_turn(
    streams: dict[str, Batches], n_workers: int, n_batches: int, settings: Settings
) -> list[Measured]:
    """Measure the seconds per batch of each stream."""
    rows = {name: Measured(name) for name in streams}
    for stream in streams.values():  # starts the workers
        take(stream, 4)
    for _ in range(settings.rounds):
        for name, stream in streams.items():
            settings.tell(f"{n_workers} workers: {name}")
            time.sleep(1)  # until the other one has stopped reading ahead
            take(stream, 2 * PREFETCH * n_workers)
            start = time.perf_counter()
            take(stream, n_batches)
            rows[name].seconds.append((time.perf_counter() - start) / n_batches)
    for stream in streams.values():  # ends the workers
        stream.close()
    return list(rows.values())


def take(stream: Batches, n_batches: int) -> None:
    for _ in range(n_batches):
        next(stream)


def decode_alone(images: Any) -> float:
    """Return the seconds per image in one process."""
    start = time.perf_counter()
    for i in range(len(images)):
        images[i]
    return (time.perf_counter() - start) / len(images)


def draw_files(folder: Path, n: int) -> list[tuple[str, int]]:
    """Write images with as much detail as photographs. Return names and labels."""
    random = np.random.default_rng(0)
    width, height = PIXELS
    pairs = []
    for i in range(n):
        coarse = random.integers(0, 256, (height // 25, width // 25, 3), np.uint8)
        smooth = Image.fromarray(coarse).resize(PIXELS, Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth) + random.normal(0, 6, (height, width, 1))
        pairs.append((f"{i}.jpg", i % 1000))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.jpg", quality=90)
    return pairs


def with_chainer(images: Any, n_workers: int) -> Batches:
    import data

    iterator = data.create_iterator(images, BATCHSIZE, n_workers, shuffle=True)
    to_batch = data.ToBatch(MEAN, DEVIATION)
    try:
        for batch in iterator:
            yield to_batch(batch)[0]
    finally:
        iterator.finalize()


def _keep_freed_memory(_: int) -> None:
    keep_freed_memory()  # like our workers


def with_torch(images: Any, n_workers: int) -> Batches:
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    loader = DataLoader(
        images,
        BATCHSIZE,
        shuffle=True,
        num_workers=n_workers,
        persistent_workers=True,
        prefetch_factor=PREFETCH,
        multiprocessing_context="forkserver",
        worker_init_fn=_keep_freed_memory,
    )
    mean, scale = (np.array(v, np.float32)[:, None, None] for v in (MEAN, 1 / DEVIATION))
    while True:
        for x, _ in loader:
            batch = np.subtract(x.numpy(), mean)
            batch *= scale
            yield batch
