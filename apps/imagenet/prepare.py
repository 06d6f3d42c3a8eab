#!/usr/bin/env python3
"""Make the lists, the names of the classes and the mean color of a folder of images.

The folder has train/CLASS/* and val/CLASS/*, or is one of ILSVRC2012, or has only folders of
classes, of which --hold-out takes a share to validate with. Or it has the IDX files of MNIST or
Fashion-MNIST, whose images are written into --out.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import socket
import unicodedata
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

import chainermn
import idx
import images
import inspection
import layouts
import reports
from chainermn.agreement import exit_together, run_on_root, run_together
from chainermn.datasets import pictures
from chainermn.datasets.names import (
    format_names,
    naturally_sorted,
    read_names,
    shown,
    write_names,
)
from chainermn.files import atomic_write, optional_path
from chainermn.progress import Progress
from data import Images, Sums
from lists import ImageList

Problems = dict[int, str]  # what is wrong with an image, by its number in a list


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    comm = chainermn.create_communicator()
    on_root = partial(run_on_root, comm, 0, "prepare.py")
    with exit_together(comm), contextlib.ExitStack() as on_error:
        on_root(lambda: args.out.mkdir(parents=True, exist_ok=True))
        on_error.callback(remove_if_empty, args.out, comm.rank)
        if on_root(lambda: idx.is_in(args.folder)):
            write = partial(idx.write_images, args.folder, args.out, comm.rank, comm.size)
            found, root = run_together(comm, "prepare.py", write), args.out
        else:
            found, root = on_root(lambda: find(args)), args.folder
        names, train, val = on_root(lambda: make_lists(found, args))
        sums = Sums()
        add = partial(add_image, sums, args.size)
        lists = [look_at(train, root.resolve(), add, comm, "mean color")]
        check = partial(whole_image, args.size) if args.verify else images.check_file
        lists.append(look_at(val, root.resolve(), check, comm, "validation images"))
        sums = comm.allreduce_obj(sums)
        on_root(lambda: finish(args, found, names, lists, root, sums))
        on_error.pop_all()
    if comm.rank == 0:
        files = [args.out / "train.txt", args.out / "val.txt"]
        train_py = Path(__file__).with_name("train.py")
        command = ["mpiexec", "-n", comm.size, train_py, *files, "--root", root]
        command += ["--allow-outside"] * args.allow_outside
        print("next:", " ".join(map(quoted, command)))


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
    classes = "names of classes: lines FOLDER<tab>NAME, or names in the order of the folders"
    add("--classes", metavar="FILE", type=optional_path, help=classes)
    add("--out", "-o", type=Path, metavar="DIR", default=Path(), help="default: current folder")
    add("--size", type=int, default=256, help="pixels per side that images are scaled to")
    outside = "allow links that lead out of DIR"
    add("--allow-outside", action="store_true", help=outside)
    add("--skip-unreadable", action="store_true", help="leave damaged images out of the lists")
    verify = "decode validation images at full size; by default, JPEG at an eighth"
    add("--verify", action="store_true", help=verify)
    as_it_is = "accept a single class, and classes of which hardly a file can be read"
    add("--as-it-is", action="store_true", help=as_it_is)
    return parser.parse_args(argv)


def find(args: argparse.Namespace) -> layouts.DataSet:
    """Find the images, according to the options."""
    options = ("train", "val", "ground_truth", "hold_out", "seed", "as_it_is", "out")
    return layouts.find_images(args.folder, **{name: getattr(args, name) for name in options})


def make_lists(
    found: layouts.DataSet, args: argparse.Namespace
) -> tuple[list[str], ImageList, ImageList]:
    """Return the names of the classes, and the lists."""
    names = name_classes(found.classes, args.classes) if args.classes else found.classes
    format_names(names, args.out / "classes.txt")  # raises before images are read
    lists = []
    for part, pairs in (("train", found.train), ("val", found.val)):
        relative = [os.fsencode(path) for path in relative_paths(found.root, pairs)]
        if broken := next((path for path in relative if b"\n" in path), None):
            path = os.fsdecode(broken)
            raise ValueError(
                f"{found.root}: no list can name {path!a}, which has a line break: rename it"
            )
        labels = [label for _, label in pairs]
        lines = (b"%b %d\n" % pair for pair in zip(relative, labels, strict=True))
        root = None if args.allow_outside else found.root
        # A mark in the first path would be taken for one of the file.
        lines = (BOM_UTF8 + line if i == 0 else line for i, line in enumerate(lines))
        lists.append(ImageList.parse(lines, args.out / f"{part}.txt", root))
    return names, *lists


def relative_paths(root: Path, pairs: layouts.Labeled) -> list[str]:
    """Return paths relative to a folder, in which most of them start."""
    begin = "" if root == Path() else f"{root}/"
    found = []
    for path in (os.fspath(path).removeprefix("./") for path, _ in pairs):
        is_below = path.startswith(begin) and os.path.isabs(path) == root.is_absolute()
        found.append(path[len(begin) :] if is_below else os.path.relpath(path, root))
    return found


def name_classes(folders: list[str], path: Path) -> list[str]:
    """Return the names of classes in a file, for folders that are sorted as text.

    Raises
    ------
    OSError, ValueError
        Also if only some lines begin with a folder, or if the names are probably in another order
        than the folders.
    """
    lines = read_names(path)
    if len(lines) != len(folders):
        raise ValueError(f"{path} has {len(lines)} lines for {len(folders)} classes")
    known = {unicodedata.normalize("NFC", folder): folder for folder in folders}
    named = dict(folder_and_name(line, known) for line in lines)
    if any(named) or any("\t" in line for line in lines):
        if missing := [folder for folder in folders if folder not in named]:
            raise ValueError(
                f"{path}: expected a line FOLDER<tab>NAME for each folder, got none for "
                f"{layouts.listing(missing)}"
            )
        return [named[folder] for folder in folders]
    if folders != (natural := naturally_sorted(folders)):
        raise ValueError(
            f"{path}: for which folders are these names? As text, folders are sorted "
            f"{layouts.listing(folders)}; people count {layouts.listing(natural)}. Give lines "
            "FOLDER<tab>NAME, in any order, or call the folders 01, 02, ..."
        )
    return lines


def folder_and_name(line: str, known: dict[str, str]) -> tuple[str, str]:
    """Return the folder that a line begins with, or else nothing, and the name that follows."""
    ends = [found.start() for found in re.finditer(r"[\t ]|\Z", line)]
    for end in reversed(ends):
        if folder := known.get(unicodedata.normalize("NFC", line[:end])):
            return folder, line[end + 1 :] or folder
    return "", line


def look_at(
    listed: ImageList,
    root: Path,
    read: Callable[[str, Path | None], object],
    comm: chainermn.CommunicatorBase,
    what: str,
) -> tuple[ImageList, np.ndarray, Problems]:
    """Read all images of a list; each rank reads those of its share.

    Returns
    -------
    ImageList
        The list.
    array of int64, shape (images, 3)
        Sizes and times of the files, and their numbers on the disk.
    dict of str
        Why images cannot be read, by their numbers.
    """
    begin, end = chainermn.scatter_index(len(listed), comm, force_equal_length=False)
    stamps, problems = np.zeros((end - begin, 3), np.int64), Problems()
    show = Progress(end - begin, what) if comm.rank == 0 else None
    for i in range(begin, end):
        path = os.path.join(root, listed[i][0])
        try:
            status = os.stat(path)
            stamps[i - begin] = *inspection.stamp_of(status), status.st_ino & (1 << 63) - 1
            read(path, root if listed.confined else None)
        except Exception as error:  # Pillow's decoders raise all kinds of exceptions
            host = socket.gethostname()
            problems[i] = f"{shown(path)} on {host} ({type(error).__name__}: {error})"
        if show:
            show.step()
    parts = comm.allgather_obj((stamps, problems))
    everything = {i: reason for _, part in parts for i, reason in part.items()}
    return listed, np.concatenate([part for part, _ in parts]), everything


def whole_image(size: int, path: str, root: Path | None) -> np.ndarray:
    """Return all of an image, scaled to a square."""
    return images.read_image(path, size, partial(images.center_box, share=1), root)


def add_image(sums: Sums, size: int, path: str, root: Path | None) -> None:
    """Add up the pixels of an image."""
    sums.add(whole_image(size, path, root))


def finish(
    args: argparse.Namespace,
    found: layouts.DataSet,
    names: list[str],
    looked_at: list[tuple[ImageList, np.ndarray, Problems]],
    root: Path,
    sums: Sums,
) -> None:
    """Say what is in the lists and what is not, and write everything; the lists come last."""
    check_files(looked_at)
    left_out = found.found.left_out(pictures.hint) + found.notes
    lists, stamps = [], []
    problems = [reason for _, _, part in looked_at for reason in part.values()]
    if problems and not args.skip_unreadable:
        named = inspection.told(problems, 10)
        raise OSError("\n".join(["cannot read", *named, "--skip-unreadable leaves them out"]))
    left_out += [f"skipped: {line}" for line in inspection.told(problems)]
    for listed, seen, unreadable in looked_at:
        lists.append(listed.without(unreadable))
        lists[-1].lines = np.arange(1, len(lists[-1]) + 1, dtype=np.int32)
        stamps.append(np.delete(seen, list(unreadable), axis=0)[:, :2])
    train, val = lists
    for label, left, total in looked_at[0][0].hardly_left(train):
        readable = f"{left} of {total} images of {shown(names[label])}"
        if not left or not args.as_it_is:
            raise OSError(f"{root}: only {readable} can be read. {layouts.AS_IT_IS}")
    with contextlib.ExitStack() as written:
        # Replaced in the opposite order: lists that are there are complete.
        write = partial(atomic_write, mode="wb")
        for listed, seen in zip(lists, stamps, strict=True):
            file = written.enter_context(write(listed.source))
            file.write(listed.content())
            file = written.enter_context(write(inspection.index_path(listed.source)))
            inspection.write_index(file, listed, seen)
        statistics = sums.statistics()
        file = written.enter_context(write(args.out / "mean.json"))
        file.write(json.dumps(statistics, indent=1).encode() + b"\n")
        write_names(args.out / "classes.txt", names)
    examples = Images(train, root, args.size)
    reports.show_images(args.out, names, train, val, examples, left_out)
    mean = ", ".join(f"{value:.2f}" for value in statistics["mean"])
    print(f"mean of red, green and blue over {len(train)} images: {mean}")
    for color, value in zip(("red", "green", "blue"), statistics["deviation"], strict=True):
        if value == 1:
            print(f"{color} is the same everywhere: its deviation counts as 1")
    files = "train.txt,val.txt,*.sizes.npy,classes.txt,mean.json,examples.png"
    print(f"written: {args.out.resolve()}/{{{files}}}")


def check_files(looked_at: list[tuple[ImageList, np.ndarray, Problems]]) -> None:
    """Raise ValueError if a link gives a file another label.

    Numbers on disks count per disk, so files are the same only if sizes and times are, too.
    """
    seen = np.concatenate([seen for _, seen, _ in looked_at])
    labels = np.concatenate([listed.labels for listed, _, _ in looked_at])
    order = np.lexsort(seen.T)
    seen, labels = seen[order], labels[order]
    is_same = (seen[1:] == seen[:-1]).all(axis=1) & (seen[1:, 2] > 0)
    for i in np.flatnonzero(is_same & (labels[1:] != labels[:-1]))[:1]:
        paths = [listed[n][0] for listed, _, _ in looked_at for n in range(len(listed))]
        one, other = (shown(paths[n]) for n in order[i : i + 2])
        raise ValueError(
            f"{one} and {other} are the same file (one is a link), in two classes: remove one"
        )


def remove_if_empty(folder: Path, rank: int) -> None:
    """Remove a folder in which nothing has been written."""
    if rank == 0:
        with contextlib.suppress(OSError):
            folder.rmdir()


def quoted(word: object) -> str:
    """Quote a word for a shell; bytes that no terminal shows become escapes."""
    text = str(word)
    if text.isprintable():
        return shlex.quote(text)
    kept = (chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in os.fsencode(text))
    return "$'" + "".join("\\" * (char in "\\'") + char for char in kept) + "'"


if __name__ == "__main__":
    main()
