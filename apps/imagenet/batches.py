"""Batches of a rank, from image files or from shards."""

import argparse
import io
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chainer
import numpy as np

import chainermn
import data
from chainermn.agreement import run_on_root, run_together
from lists import ImageList
from shard_iterator import ShardIterator, ShardOrder
from shards import Shards

Source = ImageList | Shards


def load(
    path: str | Path, root: Path, comm: chainermn.CommunicatorBase, allow_outside: bool = False
) -> Source:
    """Load a list of images, or a folder of shards, which every host must see.

    The paths of a list start from ``root``; they may lead out of it only if that is allowed.
    Whether there are files is for `inspection` to find out.

    Raises
    ------
    OSError, ValueError, RuntimeError
        On all ranks, if a shard is missing on any host, or damaged, or a list is none.
    """

    def read() -> Source:
        if Path(path).is_dir():
            return Shards.read(path)
        try:
            return ImageList.read(path, None if allow_outside else root)
        except FileNotFoundError:
            hint = "prepare.py makes lists of your images"
            raise FileNotFoundError(f"{path} is missing: {hint}") from None

    source = run_on_root(comm, 0, "images", read)
    if isinstance(source, Shards):
        run_together(comm, "images", lambda: source.check(comm.intra_rank, comm.intra_size))
    return source


def create_iterators(
    args: argparse.Namespace,
    comm: chainermn.CommunicatorBase,
    train: Source,
    validation: Source,
    about: dict[str, Any],
) -> tuple[chainer.dataset.Iterator, chainer.dataset.Iterator]:
    """Return iterators over this rank's training and validation images."""
    size = about["insize"]
    jobs = available_workers(comm) if args.loaderjob is None else args.loaderjob
    # The ranks agree on their parts before anything can fail on one of them.
    sampler = part = None
    if isinstance(train, ImageList):
        sampler = chainermn.datasets.create_distributed_sampler(train, comm, seed=args.seed)
    if isinstance(validation, ImageList):
        part = chainermn.scatter_index(len(validation), comm, force_equal_length=False)

    def create() -> tuple[chainer.dataset.Iterator, chainer.dataset.Iterator]:
        return (
            _training(train, sampler, args, size, jobs, comm),
            _validation(validation, part, args, size, jobs, comm),
        )

    return run_together(comm, "iterators", create)


def _training(
    source: Source,
    sampler: chainermn.datasets.DistributedOrderSampler | None,
    args: argparse.Namespace,
    size: int,
    jobs: int,
    comm: chainermn.CommunicatorBase,
) -> chainer.dataset.Iterator:
    cut = {"size": size, "seed": args.seed, "least": args.least_area}
    if isinstance(source, Shards):
        order = ShardOrder(source.counts, comm.rank, comm.size, args.seed)
        make = partial(data.make_example, **cut)
        return ShardIterator(source, order, args.batchsize, make, jobs)
    images, order = data.Images(source, args.root, **cut), data.EpochOrder(sampler)
    return data.create_iterator(images, args.batchsize, jobs, order_sampler=order)


def _validation(
    source: Source,
    part: tuple[int, int] | None,
    args: argparse.Namespace,
    size: int,
    jobs: int,
    comm: chainermn.CommunicatorBase,
) -> chainer.dataset.Iterator:
    if isinstance(source, Shards):
        order = ShardOrder(source.counts, comm.rank, comm.size)
        make = partial(data.make_example, size=size)
        return ShardIterator(source, order, args.val_batchsize, make, jobs, repeat=False)
    images = data.Images(source.take(range(*part)), args.root, size)
    return data.create_iterator(images, args.val_batchsize, jobs, repeat=False, shuffle=False)


def training_examples(
    source: Source, args: argparse.Namespace, size: int
) -> Sequence[tuple[np.ndarray, np.ndarray] | data.Unreadable]:
    """Return the examples of the first epoch; of shards, the first ones, as they are read."""
    cut = {"size": size, "seed": args.seed, "least": args.least_area}
    if isinstance(source, ImageList):
        return data.Images(source, args.root, **cut)
    images = source.read_images(range(min(24, source.counts[0])))
    return [data.make_example(io.BytesIO(file), name, t, i, **cut) for i, file, name, t in images]


def available_workers(comm: chainermn.CommunicatorBase) -> int:
    """Return this rank's share of the cores of its host."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // comm.intra_size)
