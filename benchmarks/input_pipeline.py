#!/usr/bin/env python3
"""Images per second that apps/imagenet reads, beside PyTorch's DataLoader on the same files.

Both read files by the same function of the app, decoding and cutting out at random as in training,
in as many worker processes, and hand over batches ready for the network: float32, less the mean,
over the deviation. The processor's time of all processes is measured besides the wall time.
PyTorch is only needed for the comparison:

    python benchmarks/input_pipeline.py --files 2000 --pixels 500x375 --workers 1 2
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "apps/imagenet"))

import data  # noqa: E402
import workers  # noqa: E402

PREFETCH = 4  # batches that a worker of PyTorch's reads ahead, and all of Chainer's together
MEAN, DEVIATION = np.array([124, 116, 104]), np.array([58, 57, 57])


def main() -> None:
    args = parse_arguments()
    workers.start_forkserver()
    workers.keep_memory()  # as create_communicator does in training
    with tempfile.TemporaryDirectory() as folder:
        listed = make_files(Path(folder), args.files, *args.pixels)
        images = data.Images(listed, folder, args.size, seed=0)
        loaders = {"chainer": with_chainer}
        try:
            import torch
        except ImportError:
            print("PyTorch is not installed: nothing to compare with")
        else:
            torch.set_num_threads(1)
            loaders["torch"] = with_torch
        print(
            f"{args.files} JPEG files of {args.pixels[0]}x{args.pixels[1]}, cut out to "
            f"{args.size}x{args.size}, batches of {args.batchsize}, {os.cpu_count()} cores; "
            f"median of {args.rounds} rounds"
        )
        print("loader   workers   images/s   images/s and core   slowest-fastest")
        alone = [one_process(images, args.files) for _ in range(args.rounds)]
        report("decoding", 0, alone)
        rates_by_workers = {0: {"decoding": [wall for wall, _ in alone]}}
        for n in args.workers:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
            streams = {name: load(images, args.batchsize, n) for name, load in loaders.items()}
            for stream in streams.values():  # workers start
                take(stream, 4)
            for _ in range(args.rounds):  # in turn: other load on the machine meets both
                for name, stream in streams.items():
                    time.sleep(1)  # until the other one has read ahead what it may
                    take(stream, 2 * PREFETCH * n)
                    found[name].append(measure(stream, args.files // args.batchsize))
            for stream in streams.values():
                stream.close()
            for name, rates in found.items():
                report(name, n, rates)
            rates_by_workers[n] = {
                name: [wall for wall, _ in rates] for name, rates in found.items()
            }
            if "torch" in found:
                pairs = zip(found["chainer"], found["torch"], strict=True)
                wall, busy = zip(*((a[0] / b[0], a[1] / b[1]) for a, b in pairs), strict=True)
                print(
                    f"chainer / torch, median of the rounds: {statistics.median(wall):.2f} "
                    f"of wall time, {statistics.median(busy):.2f} of a core"
                )
    if args.json:
        args.json.write_text(json.dumps(rates_by_workers))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--files", type=int, default=1000, help="default: %(default)s")
    add("--pixels", type=lambda text: [int(n) for n in text.split("x")], default=[500, 375])
    add("--size", type=int, default=224, help="of an example; default: %(default)s")
    add("--batchsize", type=int, default=32, help="default: %(default)s")
    add("--workers", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    add("--rounds", type=int, default=5, help="default: %(default)s")
    add("--json", metavar="FILE", type=Path, help="for the images per second of all rounds")
    return parser.parse_args()


def make_files(folder: Path, n: int, width: int, height: int) -> data.ImageList:
    """Write images with about as much detail as photographs."""
    random = np.random.default_rng(0)
    pairs = []
    for i in range(n):
        coarse = random.integers(0, 256, (height // 25, width // 25, 3), np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth) + random.normal(0, 6, (height, width, 1))
        name = f"{i}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / name, quality=90)
        pairs.append((name, i % 1000))
    return data.ImageList(pairs)


def with_chainer(
    images: data.Images, batchsize: int, n_workers: int
) -> Generator[np.ndarray, None, None]:
    iterator = data.create_iterator(images, batchsize, n_workers, shuffle=True)
    to_batch = data.ToBatch(MEAN, DEVIATION)
    try:
        for batch in iterator:
            yield to_batch(batch)[0]
    finally:
        iterator.finalize()


def with_torch(
    images: data.Images, batchsize: int, n_workers: int
) -> Generator[np.ndarray, None, None]:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        images,
        batchsize,
        shuffle=True,
        num_workers=n_workers,
        persistent_workers=True,
        prefetch_factor=PREFETCH,
        multiprocessing_context="forkserver",
    )
    mean, scale = (np.array(v, np.float32)[:, None, None] for v in (MEAN, 1 / DEVIATION))

    def normalised(x: np.ndarray) -> np.ndarray:
        result = np.subtract(x, mean)
        result *= scale
        return result

    while True:
        for x, _ in loader:
            yield normalised(x.numpy())


def one_process(images: data.Images, n: int) -> tuple[float, float]:
    start, busy = time.perf_counter(), time.process_time()
    for i in range(n):
        images[i]
    return n / (time.perf_counter() - start), n / (time.process_time() - busy)


def take(stream: Generator[np.ndarray, None, None], batches: int) -> int:
    return sum(len(next(stream)) for _ in range(batches))


def measure(stream: Generator[np.ndarray, None, None], batches: int) -> tuple[float, float]:
    """Return images per second, and per second of a core's work in any process."""
    start, busy = time.perf_counter(), processor_seconds()
    n = take(stream, batches)
    return n / (time.perf_counter() - start), n / (processor_seconds() - busy)


def processor_seconds() -> float:
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def report(name: str, n_workers: int, rates: list[tuple[float, float]]) -> None:
    wall, busy = zip(*rates, strict=True)
    middle = statistics.median(wall)
    spread = f"{min(wall):.0f}-{max(wall):.0f}"
    print(
        f"{name:<8} {n_workers:>7} {middle:>10.0f} {statistics.median(busy):>19.0f}   {spread}",
        flush=True,
    )


if __name__ == "__main__":
    main()
