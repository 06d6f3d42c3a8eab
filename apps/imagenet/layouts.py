"""Find the images of a data set in folders, and their classes."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ilsvrc
from chainermn.datasets import pictures

# All except "{}" are ILSVRC2012's: from its archives, and from those of the localization task.
PLACES = ("{}", "ILSVRC2012_img_{}", "Data/CLS-LOC/{}", "ILSVRC/Data/CLS-LOC/{}")
TRAINING = (*(place.format("train") for place in PLACES), ".")
VALIDATION = (*(place.format("val") for place in PLACES), "valid", "validation")

Labeled = list[tuple[Path, int]]


@dataclass(frozen=True)
class DataSet:
    """Image files with the numbers of their classes, and the names of the classes."""

    root: Path  # that the paths in the lists will start from
    classes: list[str]
    train: Labeled
    val: Labeled


def find_images(
    root: Path,
    train: str | None = None,
    val: str | None = None,
    ground_truth: Path | None = None,
    hold_out: float | None = None,
    seed: int = 0,
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
        hint = ". --hold-out 0.1 takes a tenth of the training images instead"
        validation = find(root, val, VALIDATION, hint)
    places = [find(root, train, TRAINING)] if train else [root / name for name in TRAINING]
    found = (class_folders(place, besides=validation) for place in places)
    folders = next(filter(None, found), None)
    if folders is None:
        raise FileNotFoundError(f"{places[0]} has no folder for each class")
    numbers = {folder.name: number for number, folder in enumerate(folders)}
    training = list_classes(folders, numbers)
    if validation is None:
        training, held_out = split(training, len(folders), hold_out, seed)
    elif inner := class_folders(validation):
        held_out = list_classes(inner, numbers)
    else:
        files = list_images(validation)
        truth = ground_truth or find(root, None, ilsvrc.GROUND_TRUTHS)
        labels = ilsvrc.read_ground_truth(truth, [path.name for path in files], numbers)
        held_out = list(zip(files, labels, strict=True))
    return DataSet(root, list(numbers), training, held_out)


def find(folder: Path, given: str | None, usual: tuple[str, ...], hint: str = "") -> Path:
    """Return the folder that the user names, or else one with a usual name."""
    names = usual if given is None else (given,)
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(f"{folder} contains none of {', '.join(names)}{hint}")


def class_folders(parent: Path, besides: Path | None = None) -> list[Path]:
    """Return the folders of the classes, sorted: those of synsets, or else all but one."""
    if not parent.is_dir():
        return []
    folders = [path for path in sorted(parent.iterdir()) if path.is_dir() and path != besides]
    synsets = [folder for folder in folders if ilsvrc.SYNSET.fullmatch(folder.name)]
    return synsets or [folder for folder in folders if not folder.name.startswith(".")]


def list_classes(folders: list[Path], numbers: dict[str, int]) -> Labeled:
    """Return the images in the folders of classes; ``numbers`` maps class names to numbers."""
    pairs = []
    for folder in folders:
        if folder.name not in numbers:
            raise ValueError(f"{folder} is none of the classes of the training images")
        pairs += [(path, numbers[folder.name]) for path in list_images(folder)]
    return pairs


def list_images(folder: Path) -> list[Path]:
    """Return the images in a folder and the folders in it, sorted, without hidden ones."""
    endings = pictures.endings()
    found, seen = [], set()
    for place, inner, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            raise ValueError(f"{place} is a link to {real}, which is there already")
        seen.add(real)
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [
            Path(place, name)
            for name in names
            if os.path.splitext(name)[1].lower() in endings and not name.startswith(".")
        ]
    if not found:
        raise FileNotFoundError(f"{folder} contains no image")
    return sorted(found)


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
