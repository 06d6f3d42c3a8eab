"""Find the images of a data set in folders, and their classes."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import ilsvrc
from chainermn.datasets import pictures
from chainermn.datasets.folders import Found, check_classes, find_classes, find_files, find_folders
from chainermn.datasets.names import shown

# All except "{}" are ILSVRC2012's: from its archives, and from those of the localization task.
PLACES = ("{}", "ILSVRC2012_img_{}", "Data/CLS-LOC/{}", "ILSVRC/Data/CLS-LOC/{}")
TRAINING = (*(place.format("train") for place in PLACES), ".")
VALIDATION = (*(place.format("val") for place in PLACES), "valid", "validation")

# Folders named with these words are parts of a data set, not classes.
PARTS = {
    *("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"),
    *("holdout", "trainset", "testset", "valset"),
}
WRITTEN = ("mean.json", "model.json", "run.json")  # by prepare.py and train.py
AS_IT_IS = "--as-it-is takes it nevertheless"

Labeled = Sequence[tuple[str | Path, int]]


@dataclass(frozen=True)
class DataSet:
    """Image files with the numbers of their classes, and the names of the classes."""

    root: Path  # that the paths in the lists will start from
    classes: list[str]
    train: Labeled
    val: Labeled
    found: Found = field(default_factory=Found)  # what was left out
    notes: list[str] = field(default_factory=list)  # what may be meant in another way


def find_images(
    root: Path,
    train: str | None = None,
    val: str | None = None,
    ground_truth: Path | None = None,
    hold_out: float | None = None,
    seed: int = 0,
    as_it_is: bool = False,
    out: Path | None = None,
) -> DataSet:
    """Find a data set with a folder of training images per class.

    Parameters
    ----------
    root : path
    train : str, optional
        Folder in ``root`` that has the folders of the classes. By default ``train``, or ``root``
        itself.
    val : str, optional
        The same for the validation images, or a folder of them all. By default ``val``.
    ground_truth : path, optional
        File that gives the classes of the latter; see `ilsvrc.read_ground_truth`.
    hold_out : float, optional
        Share of the training images of each class that is taken instead of ``val``.
    seed : int
        Seed that decides which images are held out.
    as_it_is : bool
        Whether to accept a single class, and classes with hardly a file that can be read.
    out : path, optional
        Folder for the lists, which must not be among those of the classes.

    Raises
    ------
    OSError, ValueError
        If something is missing or does not fit.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    if val is not None and hold_out is not None:
        raise ValueError("give either --val or --hold-out")
    validation = None
    if hold_out is None:
        hint = ". --val DIR names the folder; --hold-out 0.1 takes a tenth of the training images"
        validation = find(root, val, VALIDATION, hint)
    places = [find(root, train, TRAINING)] if train else [root / name for name in TRAINING]
    parent = next((place for place in places if class_names(place, validation)), None)
    if parent is None:
        raise FileNotFoundError(f"{places[0]} has no folder for each class")
    classes = class_names(parent, validation)
    if train is None and all(PARTS.intersection(words(name)) for name in classes):
        example = next((name for name in classes if "train" in name.lower()), classes[0])
        raise ValueError(
            f"{shown(parent)} has only {listing(classes)}, which seem to be parts of a data set, "
            f"not classes: name the one to train with, such as --train {shlex.quote(example)}"
        )
    check_meant(parent, classes, out)
    if validation:
        check_apart(parent, classes, validation)
    numbers = {name: number for number, name in enumerate(classes)}
    training, of_classes = list_classes(parent, classes, numbers)
    parts = [find_files(parent, (), below=False), *of_classes.values()]
    if validation is None:
        training, held_out = split(training, len(classes), hold_out, seed)
    elif inner := class_names(validation):
        held_out, found = list_classes(validation, inner, numbers)
        parts += [find_files(validation, (), below=False), *found.values()]
    else:
        parts.append(find_files(validation, pictures.endings()))
        files = parts[-1].files
        if not files:
            raise FileNotFoundError(
                f"{shown(validation)} contains no image{parts[-1].besides(pictures.hint)}"
            )
        truth = ground_truth or find(root, None, ilsvrc.GROUND_TRUTHS)
        names = [os.path.basename(path) for path in files]
        labels = ilsvrc.read_ground_truth(truth, names, numbers)
        held_out = list(zip(files, labels, strict=True))
    if not as_it_is:
        try:
            check_classes(parent, of_classes, pictures.hint)
        except ValueError as error:
            raise ValueError(f"{error}. {AS_IT_IS}") from None
    notes = deeper(parent, of_classes)
    if beside := [str(path) for path in siblings(parent, root) if path != validation]:
        notes.append(f"left out: folders beside those of the classes: {listing(beside)}")
    return DataSet(root, classes, training, held_out, Found.joined(parts), notes)


def find(folder: Path, given: str | None, usual: tuple[str, ...], hint: str = "") -> Path:
    """Return the folder that the user names, or else one with a usual name."""
    names = usual if given is None else (given,)
    for name in names:
        if (folder / name).exists():
            return folder / name
    lies_there = f"it has {listing(find_folders(folder))}" if find_folders(folder) else "no folder"
    missing = f"{shown(folder)} contains none of {', '.join(names)} ({lies_there})"
    raise FileNotFoundError(f"{missing}{hint}")


def class_names(parent: Path, besides: Path | None = None) -> list[str]:
    """Return the names of the folders in a folder, sorted as text, except one."""
    names = find_folders(parent) if parent.is_dir() else []
    return [name for name in names if parent / name != besides]


def siblings(folder: Path, root: Path) -> list[Path]:
    """Return the other folders beside a folder, which is in ``root``."""
    if folder.resolve() == root.resolve():
        return []
    others = (folder.parent / name for name in find_folders(folder.parent))
    return [path for path in others if path != folder]


def list_classes(
    parent: Path, classes: list[str], numbers: dict[str, int]
) -> tuple[list[tuple[str, int]], dict[str, Found]]:
    """Return the images in the folders of classes with their numbers, and what each folder has."""
    for name in classes:
        if name not in numbers:
            raise ValueError(
                f"{shown(parent / name)} is none of the classes of the training images"
            )
    found = find_classes(parent, classes, pictures.endings(), pictures.hint)
    return [(path, numbers[name]) for name, part in found.items() for path in part.files], found


def check_meant(parent: Path, classes: list[str], out: Path | None) -> None:
    """Raise ValueError if the folder of a class is something else."""
    if out and Path(os.path.realpath(parent)) in Path(os.path.realpath(out)).parents:
        raise ValueError(
            f"--out {shown(out)} is in {shown(parent)}, where each folder is a class: give another"
        )
    for name in classes:
        for made in WRITTEN:
            if (parent / name / made).is_file():
                raise ValueError(
                    f"{shown(parent / name)} seems to be no class but what a program has written "
                    f"(it has {made}): move it out of {shown(parent)}"
                )
        if not PARTS.isdisjoint(words(name)):
            inner = sorted(set(classes).intersection(find_folders(parent / name)))
            if inner:
                raise ValueError(
                    f"{shown(parent / name)} has folders of other classes ({listing(inner)}), so "
                    f"it seems to be part of a data set: move it out of {shown(parent)}"
                )


def check_apart(parent: Path, classes: list[str], validation: Path) -> None:
    """Raise ValueError if images to validate with would also be trained with."""
    place = Path(os.path.realpath(validation))
    if place == Path(os.path.realpath(parent)):
        raise ValueError(f"{shown(validation)} and {shown(parent)} are the same folder")
    for name in classes:
        if place.is_relative_to(os.path.realpath(parent / name)):
            raise ValueError(
                f"{shown(validation)} is in {shown(parent / name)}, which is a class to train "
                "with: give the folder that has the folders of the classes by --train"
            )


def deeper(parent: Path, found: dict[str, Found]) -> list[str]:
    """Return a line on a class whose images lie in several folders, which may be the classes."""
    for name, part in found.items():
        folder = os.path.join(parent, name)
        inner = sorted({os.path.dirname(path) for path in part.files})
        if len(inner) > 1 and folder not in inner:
            example = shown(os.path.relpath(inner[0], parent))
            where = f"lie in {len(inner)} folders below it, such as {example}"
            return [f"images of {shown(name)} {where}: all of them are one class"]
    return []


def words(name: str) -> list[str]:
    """Return the words in a name, such as ``seg_train``, in lower case."""
    return re.split(r"[^a-z]+", name.lower())


def listing(names: list[str]) -> str:
    """Return a few names for a message."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(shown, names[:5])) + more


def split(pairs: Labeled, n_classes: int, share: float, seed: int) -> tuple[Labeled, Labeled]:
    """Hold out a share of the images of each class, chosen at random, but never all of them."""
    if not 0 < share < 1:
        raise ValueError(f"--hold-out must be between 0 and 1, got {share}")
    labels = np.array([label for _, label in pairs])
    random = np.random.default_rng(seed)
    is_held_out = np.zeros(len(pairs), bool)
    for label in range(n_classes):
        order = random.permutation(np.flatnonzero(labels == label))
        is_held_out[order[: min(round(share * len(order)), len(order) - 1)]] = True
    if not is_held_out.any():
        raise ValueError(f"--hold-out {share} of so few images is none")
    kept, held_out = (
        [pair for pair, held in zip(pairs, is_held_out, strict=True) if held == which]
        for which in (False, True)
    )
    return kept, held_out
