"""What a training is about to learn from, for people to look at before it starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chainermn.datasets.names import shown

__all__ = ["choose_examples", "class_table", "draw_examples", "show_classes"]

_COLUMNS, _ROWS = 6, 4  # of a page, readable on a phone
_SIDE, _TITLE, _GAP = 120, 18, 10  # pixels
_LONGEST_NAME = 40


def show_classes(
    out: str | os.PathLike[str],
    names: Sequence[str],
    labels: Mapping[str, ArrayLike],
    picture: Callable[[int], ArrayLike],
    most: int = 11,
) -> None:
    """Print a table of classes, and draw some examples of the first set as ``out/examples.png``.

    Parameters
    ----------
    out : path
        Folder, which is made if it does not exist.
    names : sequence of str
        Names of the classes.
    labels : mapping of array of int, shape (examples,)
        Labels, by what the examples are for, such as ``train``.
    picture : callable
        Function from the index of an example of the first set to its picture, as
        `draw_examples` takes it.
    most : int
        Largest number of lines of the table, see `class_table`.

    Raises
    ------
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> from chainermn.datasets.overview import show_classes
    >>> if comm.rank == 0:
    ...     show_classes(".", ["cat", "dog"], {"train": [0, 1, 1]}, lambda i: np.eye(8))
    class       train
        0 cat       1
        1 dog       2
    """
    arrays = {what: np.asarray(found, np.int64) for what, found in labels.items()}
    counts = {what: np.bincount(found, minlength=len(names)) for what, found in arrays.items()}
    print("\n".join(class_table(names, counts, most)), flush=True)
    first = next(iter(arrays.values()))
    chosen = choose_examples(first)
    titles = [f"{first[i]} {shown(names[first[i]])}" for i in chosen]
    Path(out).mkdir(parents=True, exist_ok=True)
    draw_examples(Path(out, "examples.png"), [picture(int(i)) for i in chosen], titles)


def class_table(names: Sequence[str], counts: Mapping[str, ArrayLike], most: int) -> list[str]:
    r"""Return a table of classes, one on each line: label, name and counts.

    Parameters
    ----------
    names : sequence of str
        Names of the classes.
    counts : mapping of array of int, shape (classes,)
        Numbers of examples, by what they are for; the first decides which classes are largest.
    most : int
        Largest number of lines. Of more classes, the largest and the smallest are shown.

    Examples
    --------
    >>> from chainermn.datasets.overview import class_table
    >>> counts = {"train": [80, 3, 75], "validate": [20, 1, 19]}
    >>> print("\n".join(class_table(["blue", "gold", "red"], counts, most=11)))
    class        train  validate
        0 blue      80        20
        1 gold       3         1
        2 red       75        19
    """
    columns = {what: np.asarray(values) for what, values in counts.items()}
    first = next(iter(columns.values()))
    chosen: list[int | None] = list(range(len(names)))
    if len(names) > most - 1:
        by_size = sorted(range(len(names)), key=lambda label: (-first[label], label))
        n = most - 2
        chosen = [*by_size[: n - n // 2], None, *by_size[len(by_size) - n // 2 :]]
    titles = {label: _short(shown(names[label])) for label in chosen if label is not None}
    width = max(map(len, titles.values()), default=0)
    lines = [f"class {'':{width}}" + "".join(f"  {what:>6}" for what in columns)]
    for label in chosen:
        if label is None:
            total = len(names) - len(titles)
            lines.append(f"  ... {total} classes of a size between these")
            continue
        values = (f"  {values[label]:>{max(6, len(what))}}" for what, values in columns.items())
        lines.append(f"{label:5} {titles[label]:{width}}" + "".join(values))
    return lines


def choose_examples(labels: ArrayLike, n: int = _COLUMNS * _ROWS) -> NDArray[np.int64]:
    """Return the indices of ``n`` examples, or of all: first one of each class, then another.

    Classes are taken evenly from all of them if there are more than ``n``, and so are the examples
    of a class.

    Examples
    --------
    >>> from chainermn.datasets.overview import choose_examples
    >>> choose_examples([0, 0, 0, 0, 1, 1], 4)
    array([0, 2, 4, 5])
    """
    labels = np.asarray(labels)
    classes, sizes = np.unique(labels, return_counts=True)
    if len(classes) > n:
        classes = classes[np.linspace(0, len(classes) - 1, n).astype(int)]
        return np.sort([np.flatnonzero(labels == label)[0] for label in classes])
    taken = np.zeros(len(classes), int)
    for _ in range(min(n, len(labels))):
        free = taken < sizes
        taken[np.flatnonzero(free)[np.argmin(taken[free])]] += 1
    order = np.argsort(labels, kind="stable")
    starts = np.cumsum(sizes) - sizes
    found = [
        order[start + np.arange(k) * size // k]
        for start, size, k in zip(starts, sizes, taken, strict=True)
        if k
    ]
    return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


def draw_examples(
    path: str | os.PathLike[str], pictures: Sequence[ArrayLike], labels: Sequence[str]
) -> None:
    """Draw a page of pictures, each under its label, as PNG. Needs Pillow and matplotlib.

    Parameters
    ----------
    path : path
        File to write.
    pictures : sequence of array
        Gray ones, of shape (height, width), or red, green and blue, of shape (height, width, 3).
        Numbers are from 0 to 255 (uint8) or from 0 to 1 (floating point).
    labels : sequence of str
        What to write above each.

    Raises
    ------
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> from chainermn.datasets.overview import draw_examples
    >>> if comm.rank == 0:
    ...     draw_examples("examples.png", [np.zeros((8, 8)), np.ones((8, 8))], ["black", "white"])
    """
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    rows = max(1, -(-len(pictures) // _COLUMNS))
    page = Image.new("RGB", (_COLUMNS * (_SIDE + _GAP), rows * (_SIDE + _GAP + _TITLE)), "white")
    draw = ImageDraw.Draw(page)
    # Drawing by matplotlib would take ten times as long, but its font has more letters.
    font_file = os.path.join(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")
    font = ImageFont.truetype(font_file, _TITLE * 0.6)
    for place, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        row, column = divmod(place, _COLUMNS)
        left, top = column * (_SIDE + _GAP) + _GAP // 2, row * (_SIDE + _GAP + _TITLE)
        pixels = np.asarray(picture)
        if pixels.dtype != np.uint8:
            pixels = np.rint(pixels * 255).astype(np.uint8)
        image = Image.fromarray(pixels)
        scale = _SIDE / max(image.size)
        size = [max(1, round(n * scale)) for n in image.size]
        how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX
        page.paste(image.resize(size, how), (left, top + _TITLE))
        draw.text((left, top + 1), _short(label, 20), "black", font)
    page.save(path, "PNG")


def _short(text: str, longest: int = _LONGEST_NAME) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
