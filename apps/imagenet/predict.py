#!/usr/bin/env python3
"""Classify images with a network that train.py has trained."""

import argparse
import contextlib
import csv
import itertools
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import chainer
import numpy as np

import images
import trained
from chainermn.datasets import pictures
from chainermn.datasets.folders import find_files
from chainermn.datasets.names import shown
from chainermn.files import exit_on_error, optional_path
from data import CENTER


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    with contextlib.ExitStack() as stack:
        with exit_on_error():
            model = trained.load(args.model)
            device = chainer.get_device("@cupy:0" if args.gpu else "@numpy")
            device.use()
            model.recognizer.to_device(device)
            files = [file for path in args.images for file in list_files(path)]
            target = args.csv or os.devnull
            # Bytes of names that are not UTF-8 become escapes, so that all programs can read it.
            how = {"newline": "", "encoding": "utf-8", "errors": "backslashreplace"}
            file = stack.enter_context(open(target, "w", **how))
        table = csv.writer(file)
        numbers = range(1, 1 + min(trained.SHOWN, len(model.classes)))
        table.writerow(["file", *(f"{what} {i}" for i in numbers for what in ("class", "share"))])
        unreadable = 0
        for path, found in recognize(model, files, args.batchsize):
            if isinstance(found, Exception):
                print(f"{shown(path)}: {type(found).__name__}: {found}", file=sys.stderr)
                unreadable += 1
                continue
            lines = (f"  {share:6.1%}  {shown(name)}" for name, share in found)
            print(shown(path), *lines, sep="\n")
            table.writerow([path, *itertools.chain.from_iterable(found)])
    if unreadable:
        print(f"{unreadable} of {len(files)} files cannot be read", file=sys.stderr)
    return min(unreadable, 1)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    images = "image file, or folder of image files"
    add("images", metavar="IMAGE", nargs="+", type=Path, help=images)
    default = " or else ".join(map(str, trained.DEFAULTS))
    add("--model", "-m", type=optional_path, metavar="FILE", help=f"weights; default: {default}")
    add("--batchsize", "-b", type=int, default=32, help="batch size; default: %(default)s")
    add("--gpu", "-g", action="store_true", help="compute on a GPU")
    add("--csv", metavar="FILE", help="also write a table, with a row for each image")
    return parser.parse_args(argv)


def list_files(path: Path) -> list[Path]:
    """Return the images in a folder; a path that is not a folder counts as an image.

    What is left out is told on standard error.
    """
    if not path.is_dir():
        return [path]
    found = find_files(path, pictures.endings())
    if not found.files:
        raise FileNotFoundError(f"{shown(path)} contains no image{found.besides(pictures.hint)}")
    for line in found.left_out(pictures.hint):
        print(line, file=sys.stderr)
    return [Path(file) for file in found.files]


def recognize(
    model: trained.Trained, files: list[Path], batchsize: int
) -> Iterator[tuple[Path, list[tuple[str, float]] | Exception]]:
    """Yield each file with its most likely classes, or why it cannot be read."""
    pairs = read_images(files, model.insize, ahead=2 * batchsize)
    while batch := list(itertools.islice(pairs, batchsize)):
        readable = [image for _, image in batch if not isinstance(image, Exception)]
        shares = iter(model.shares(np.stack(readable)) if readable else ())
        for path, image in batch:
            yield path, image if isinstance(image, Exception) else model.likeliest(next(shares))


def read_images(
    files: list[Path], size: int, ahead: int
) -> Iterator[tuple[Path, np.ndarray | Exception]]:
    """Yield each file with its image, or the exception; threads read files ahead."""
    choose = partial(images.center_box, share=CENTER)
    left, reading = iter(files), deque()
    with ThreadPoolExecutor() as threads:
        while True:
            for path in itertools.islice(left, ahead - len(reading)):
                reading.append((path, threads.submit(images.read_image, path, size, choose)))
            if not reading:
                return
            path, image = reading.popleft()
            yield path, image.exception() or image.result()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends without a message in front of head
    sys.exit(main())
