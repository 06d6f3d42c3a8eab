#!/usr/bin/env python3
"""Make the lists, the names of the classes and the mean color of a folder of images.

The folder has train/CLASS/* and val/CLASS/*, or is one of ILSVRC2012, or has only folders of
classes, of which --hold-out takes a share to validate with. Or it has the IDX files of MNIST or
Fashion-MNIST, whose images are written into --out.
"""

import argparse
import json
import os
import shlex
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chainermn
import idx
import images
import layouts
from chainermn.agreement import exit_together, run_on_root, run_together
from chainermn.files import optional_path, read_text
from chainermn.progress import Progress
from data import ImageList, Sums


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    comm = chainermn.create_communicator()
    on_root = partial(run_on_root, comm, 0, "prepare.py")
    with exit_together(comm):
        on_root(lambda: args.out.mkdir(parents=True, exist_ok=True))
        if on_root(lambda: idx.is_in(args.folder)):
            write = partial(idx.write_images, args.folder, args.out, comm.rank, comm.size)
            found = run_together(comm, "prepare.py", write)
            train, root = on_root(lambda: write_lists(found, args)), args.out
        else:
            train, root = on_root(lambda: write_lists(find(args), args)), args.folder
        sums, unreadable = add_up(train, root.resolve(), args.size, comm)
        if unreadable and not args.skip_unreadable:
            hint = "--skip-unreadable leaves them out"
            raise OSError("\n".join(["cannot read", *unreadable, hint]))
        on_root(lambda: write_mean(sums, len(train) - len(unreadable), args.out))
    if comm.rank == 0:
        for file in unreadable:
            print(f"skipped: {file}")
        files = [args.out / "train.txt", args.out / "val.txt"]
        train_py = Path(__file__).with_name("train.py")
        command = ["mpiexec", "-n", comm.size, train_py, *files, "--root", root]
        command += ["--allow-outside"] * args.allow_outside
        print("next:", shlex.join(map(str, command)))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="folder with the images")
    train = "folder in DIR with a folder per class; default: searched for"
    add("--train", metavar="DIR", help=train)
    add("--val", metavar="DIR", help="the same for validation, or a folder with all its images")
    ground_truth = "classes of the images in the latter (ILSVRC2012)"
    add("--ground-truth", metavar="FILE", type=optional_path, help=ground_truth)
    add("--hold-out", metavar="SHARE", type=float, help="share of each class to validate with")
    add("--seed", type=int, default=0, help="seed of the choice of validation images")
    add("--classes", metavar="FILE", type=optional_path, help="names of classes, line by line")
    add("--out", "-o", type=Path, metavar="DIR", default=Path(), help="default: current folder")
    add("--size", type=int, default=256, help="pixels per side that images are scaled to")
    outside = "allow links that lead out of DIR"
    add("--allow-outside", action="store_true", help=outside)
    add("--skip-unreadable", action="store_true", help="skip damaged images")
    return parser.parse_args(argv)


def find(args: argparse.Namespace) -> layouts.DataSet:
    """Find the images, according to the options."""
    options = ("train", "val", "ground_truth", "hold_out", "seed")
    return layouts.find_images(args.folder, **{name: getattr(args, name) for name in options})


def write_lists(found: layouts.DataSet, args: argparse.Namespace) -> ImageList:
    """Write ``train.txt``, ``val.txt`` and ``classes.txt``; return the training images."""
    names = found.classes
    if args.classes:
        names = read_text(args.classes).splitlines()
        if len(names) != len(found.classes):
            raise ValueError(
                f"{args.classes} has {len(names)} lines for {len(found.classes)} classes"
            )
    (args.out / "classes.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    for part, pairs in (("train", found.train), ("val", found.val)):
        relative = ((os.path.relpath(path, found.root), label) for path, label in pairs)
        lines = [f"{Path(path).as_posix()} {label}\n" for path, label in relative]
        if broken := next((line for line in lines if line.count("\n") > 1), None):
            raise ValueError(f"{found.root}: no list can name {broken!r}, which has a line break")
        (args.out / f"{part}.txt").write_bytes(os.fsencode("".join(lines)))
        print(f"{part}: {len(lines)} images of {len(names)} classes", flush=True)
    root = None if args.allow_outside else found.root
    train, _ = (ImageList.read(args.out / f"{part}.txt", root) for part in ("train", "val"))
    return train


def add_up(
    listed: ImageList, root: Path, size: int, comm: chainermn.CommunicatorBase
) -> tuple[Sums, list[str]]:
    """Add up the pixels of all images; each rank adds those of its share.

    Returns
    -------
    Sums
        Sums over all images, exactly the same for any number of ranks.
    list of str
        Files that cannot be read, and why.
    """
    begin, end = chainermn.scatter_index(len(listed), comm, force_equal_length=False)
    sums, unreadable = Sums(), []
    show = Progress(end - begin, "mean color") if comm.rank == 0 else None
    choose = partial(images.center_box, share=1)
    for i in range(begin, end):
        path = root / listed[i][0]
        try:
            sums.add(images.read_image(path, size, choose, root if listed.confined else None))
        except Exception as error:  # Pillow's decoders raise all kinds of exceptions
            host = socket.gethostname()
            unreadable.append(f"{path} on {host} ({type(error).__name__}: {error})")
        if show:
            show.step()
    return comm.allreduce_obj(sums), comm.allreduce_obj(unreadable)


def write_mean(sums: Sums, n: int, out: Path) -> None:
    """Write ``mean.json``, the statistics of ``n`` images."""
    statistics = sums.statistics()
    (out / "mean.json").write_text(json.dumps(statistics, indent=1) + "\n")
    mean = ", ".join(f"{value:.2f}" for value in statistics["mean"])
    print(f"mean of red, green and blue over {n} images: {mean}")
    print(f"written: {out.resolve()}/{{train.txt,val.txt,classes.txt,mean.json}}")


if __name__ == "__main__":
    main()
