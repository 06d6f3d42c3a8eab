#!/usr/bin/env python3
"""Make the lists, the names of the classes and the mean colour of ILSVRC2012."""

import argparse
import csv
import json
import os
import re
import socket
from functools import partial
from pathlib import Path

import chainermn
import images
from chainermn.progress import Progress
from data import ImageList, Sums

SYNSET = re.compile(r"n\d{8}")
ENDINGS = {".jpeg", ".jpg", ".png"}
# As the archives are unpacked by most, and as those of the localization task are packed.
PARTS = ("{}", "ILSVRC2012_img_{}", "Data/CLS-LOC/{}", "ILSVRC/Data/CLS-LOC/{}")
GROUND_TRUTHS = (
    "val.txt",
    "LOC_val_solution.csv",
    "ILSVRC2012_validation_ground_truth.txt",
    "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
)


def main() -> None:
    args = parse_arguments()
    comm = chainermn.create_communicator()
    if comm.rank == 0:
        write_lists(args)
    train = comm.bcast_obj(ImageList.read(args.out / "train.txt") if comm.rank == 0 else None)
    sums, unreadable = add_up(train, args.ilsvrc, args.size, comm)
    if unreadable and not args.skip_unreadable:
        raise OSError("\n".join(["cannot read", *unreadable, "--skip-unreadable leaves them out"]))
    if comm.rank == 0:
        for file in unreadable:
            print(f"skipped: {file}")
        statistics = sums.statistics()
        (args.out / "mean.json").write_text(json.dumps(statistics, indent=1) + "\n")
        mean = ", ".join(f"{value:.2f}" for value in statistics["mean"])
        print(f"mean of red, green and blue over {len(train) - len(unreadable)} images: {mean}")
        print(f"written: {args.out.resolve()}/{{train.txt,val.txt,classes.txt,mean.json}}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("ilsvrc", metavar="ILSVRC_DIR", type=Path, help="folder with the images")
    add("--train", metavar="DIR", help="the folder of synset folders in it; looked for by default")
    add(
        "--val", metavar="DIR", help="the same of the validation images, or the folder of them all"
    )
    add("--ground-truth", metavar="FILE", type=Path, help="classes of the latter")
    add("--out", "-o", type=Path, metavar="DIR", default=Path(), help="default: current folder")
    add("--size", type=int, default=256, help="pixels of a side that images are scaled to")
    add("--skip-unreadable", action="store_true", help="do not end at images that are damaged")
    return parser.parse_args()


def write_lists(args: argparse.Namespace) -> None:
    """Write ``train.txt``, ``val.txt`` and ``classes.txt``."""
    train = find(args.ilsvrc, args.train, (*(name.format("train") for name in PARTS), "."))
    synsets = sorted(folder.name for folder in train.iterdir() if is_synset(folder))
    if not synsets:
        raise FileNotFoundError(f"{train} contains no folder called like n01440764")
    numbers = {synset: number for number, synset in enumerate(synsets)}
    lists = {"train": list_folders(train, numbers)}

    validation = find(args.ilsvrc, args.val, tuple(name.format("val") for name in PARTS))
    if any(is_synset(folder) for folder in validation.iterdir()):
        lists["val"] = list_folders(validation, numbers)
    else:
        files = sorted(path for path in validation.iterdir() if path.suffix.lower() in ENDINGS)
        truth = args.ground_truth or find(args.ilsvrc, None, GROUND_TRUTHS)
        labels = read_ground_truth(truth, [path.name for path in files], numbers)
        lists["val"] = list(zip(files, labels, strict=True))

    args.out.mkdir(parents=True, exist_ok=True)
    for part, pairs in lists.items():
        lines = [f"{path.relative_to(args.ilsvrc).as_posix()} {label}\n" for path, label in pairs]
        (args.out / f"{part}.txt").write_bytes(os.fsencode("".join(lines)))
        print(f"{part}: {len(lines)} images", flush=True)
    (args.out / "classes.txt").write_text("\n".join(synsets) + "\n")


def find(folder: Path, given: str | None, usual: tuple[str, ...]) -> Path:
    """Return what the user names in the folder, or else what has a usual name there."""
    for name in usual if given is None else (given,):
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(
        f"{folder} contains none of {', '.join(usual if not given else [given])}"
    )


def is_synset(folder: Path) -> bool:
    return bool(SYNSET.fullmatch(folder.name)) and folder.is_dir()


def list_folders(parent: Path, numbers: dict[str, int]) -> list[tuple[Path, int]]:
    pairs = []
    for folder in sorted(filter(is_synset, parent.iterdir())):
        if folder.name not in numbers:
            raise ValueError(f"{folder} is none of the classes of the training images")
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
        pairs += [(path, numbers[folder.name]) for path in files]
    return pairs


def read_ground_truth(path: Path, names: list[str], numbers: dict[str, int]) -> list[int]:
    """Return the classes of the validation images.

    Parameters
    ----------
    path : path
        ``LOC_val_solution.csv``; or a file with a line for each image, in the order of their
        names, that ends with a synset (``n01440764``), with a number from 0 in the order of the
        synsets, as in lines ``name number``, or is the development kit's number alone, to which
        ``meta.mat`` beside it gives the synset (needs SciPy).
    names : list of str
        Of the files, in order.
    numbers : dict
        From synset to number of the class.

    Raises
    ------
    ValueError
        If a line is something else, or the file is not of these images.
    """
    if path.suffix == ".csv":
        with open(path, newline="") as file:
            rows = {row["ImageId"]: row["PredictionString"] for row in csv.DictReader(file)}
        try:
            return [numbers[rows[Path(name).stem].split()[0]] for name in names]
        except KeyError as error:
            raise ValueError(f"{path} does not fit the images: {error} is missing") from None
    lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if len(lines) != len(names):
        raise ValueError(f"{path} has {len(lines)} lines for {len(names)} images")
    if all(len(line) > 1 for line in lines):
        by_name = {Path(line[0]).name: line[-1] for line in lines}
        if set(by_name) != set(names):
            raise ValueError(f"{path} names other images than the folder has")
        last = [by_name[name] for name in names]
    else:
        last = [line[0] for line in lines]
        if all(word.isdecimal() for word in last):
            synsets = read_development_kit(path.with_name("meta.mat"))
            last = [synsets[int(word)] for word in last]
    try:
        labels = [numbers[word] if SYNSET.fullmatch(word) else int(word) for word in last]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: {error} is no class of the training images") from None
    if not all(0 <= label < len(numbers) for label in labels):
        raise ValueError(f"{path}: expected numbers from 0 to {len(numbers) - 1}")
    return labels


def read_development_kit(path: Path) -> dict[int, str]:
    """Return the synsets by the development kit's own numbers, ``ILSVRC2012_ID``."""
    from scipy.io import loadmat

    synsets = loadmat(path, squeeze_me=True)["synsets"]
    return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}


def add_up(
    listed: ImageList, root: Path, size: int, comm: chainermn.CommunicatorBase
) -> tuple[Sums, list[str]]:
    """Add up the pixels of all images, each rank those of its part.

    Returns
    -------
    Sums
        Exactly the same for any number of ranks.
    list of str
        Files that cannot be read, and why.
    """
    begin, end = chainermn.scatter_index(len(listed), comm, force_equal_length=False)
    sums, unreadable = Sums(), []
    show = Progress(end - begin, "mean colour") if comm.rank == 0 else None
    choose = partial(images.centre_box, share=1)
    for i in range(begin, end):
        path = root / listed[i][0]
        try:
            sums.add(images.read_image(path, size, choose))
        except Exception as error:  # Pillow's decoders raise what they like
            host = socket.gethostname()
            unreadable.append(f"{path} on {host} ({type(error).__name__}: {error})")
        if show:
            show.step()
    return comm.allreduce_obj(sums), comm.allreduce_obj(unreadable)


if __name__ == "__main__":
    main()
