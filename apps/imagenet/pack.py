#!/usr/bin/env python3
"""Put the images of a list into tar files in webdataset's format, or index such files."""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import chainermn
import images
import shards
from chainermn.agreement import exit_together, run_on_root, run_together
from chainermn.datasets.names import check_labels, read_names
from chainermn.files import optional_path
from chainermn.progress import Progress
from inspection import Inspection
from lists import MOST_CLASSES, ImageList


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    comm = chainermn.create_communicator()
    with exit_together(comm):
        if args.source.is_dir():
            out = args.source
            paths = run_on_root(comm, 0, "pack", lambda: find(out))
            write = None
        else:
            out = args.out
            paths, write = prepare(args, comm)
        mine = paths[comm.rank :: comm.size]
        rows = run_together(comm, "pack", lambda: work(mine, write, comm))
        index = [row for part in comm.allgather_obj(rows) for row in part]
        index.sort(key=lambda row: row["name"])
        run_on_root(comm, 0, "pack", lambda: finish(args.source, out, index))
    if comm.rank == 0:
        n_images = sum(row["images"] for row in index)
        print(f"{n_images} images in {len(index)} shards: {out.resolve()}")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    source = "list of lines 'path label', or folder of tar files to index"
    add("source", metavar="LIST", type=Path, help=source)
    root = "folder that the list's paths start from"
    add("--root", "-R", metavar="DIR", type=Path, default=Path(), help=root)
    outside = "allow paths in LIST, and links, that lead out of --root"
    add("--allow-outside", action="store_true", help=outside)
    add("--skip-unreadable", action="store_true", help="leave damaged images out")
    add("--out", "-o", metavar="DIR", type=optional_path, help="folder for the shards of LIST")
    add("--images", type=int, default=1000, help="images per shard; default: %(default)s")
    args = parser.parse_args(argv)
    if args.source.is_dir() == (args.out is not None):
        parser.error("give --out with a list, and nothing else with a folder of tar files")
    return args


def find(folder: Path) -> list[Path]:
    """Return the tar files of a folder."""
    found = sorted(folder.glob("*.tar"))
    if not found:
        raise FileNotFoundError(f"{folder} contains no file *.tar")
    return found


def prepare(args: argparse.Namespace, comm: chainermn.CommunicatorBase) -> tuple[list[Path], Any]:
    """Return the paths of the shards, and a function that writes one of them."""

    def read() -> ImageList:
        listed = ImageList.read(args.source, None if args.allow_outside else args.root)
        if (classes := args.source.with_name("classes.txt")).exists():
            check_labels(listed.labels, read_names(classes, MOST_CLASSES), args.source)
        return listed

    def clear() -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / shards.INDEX).unlink(missing_ok=True)  # written when everything is complete

    listed = run_on_root(comm, 0, "pack", read)
    skip = args.skip_unreadable
    (listed,) = Inspection([(listed, images.check_file)], args.root, comm, skip).settle()
    run_on_root(comm, 0, "pack", clear)
    # Lists are sorted by class; each shard gets images of all classes.
    order = np.random.default_rng(0).permutation(len(listed))
    paths = [args.out / f"{i:06}.tar" for i in range(-(-len(listed) // args.images))]

    root = args.root.resolve()

    def write(path: Path) -> None:
        begin = int(path.stem) * args.images
        numbers = order[begin : begin + args.images].tolist()
        pairs = [listed[i] for i in numbers]
        files = ((f"{i:08}", root / name, n) for i, (name, n) in zip(numbers, pairs, strict=True))
        shards.write_shard(path, files, root if listed.confined else None)

    return paths, write


def work(paths: list[Path], write: Any, comm: chainermn.CommunicatorBase) -> list[dict[str, Any]]:
    """Write shards, unless they exist, and return their rows of the index."""
    show = Progress(len(paths), "shards") if comm.rank == 0 else None
    rows = []
    for path in paths:
        if write:
            write(path)
        rows.append(shards.describe_shard(path))
        if show:
            show.step()
    return rows


def finish(source: Path, out: Path, index: list[dict[str, Any]]) -> None:
    """Write the index, and copy the files that train.py reads beside a list."""
    for name in ("classes.txt", "mean.json", "mean.npy"):
        beside = source.with_name(name)
        if source.is_file() and beside.exists() and beside.parent != out:
            shutil.copyfile(beside, out / name)
    (out / shards.INDEX).write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main()
