"""What a training is about to learn from, for people to look at before it starts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chainermn.datasets.names import shown

__all__ = ["choose_examples", "class_table", "draw_examples"]

_COLUMNS, _ROWS = 6, 4  # of a page, readable on a phone
_LONGEST_NAME = 40


def class_table(names: Sequence[str], counts: Mapping[str, ArrayLike], most: int = 9) -> list[str]:
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
    >>> print("\n".join(class_table(["blue", "gold", "red"], counts)))
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
    titles = [_short(names[label]) for label in chosen if label is not None]
    width = max(map(len, titles))
    lines = [f"class {'':{width}}" + "".join(f"  {what:>6}" for what in columns)]
    for label in chosen:
        if label is None:
            total = len(names) - len(titles)
            lines.append(f"  ... {total} classes of a size between these")
            continue
        values = (f"  {values[label]:>{max(6, len(what))}}" for what, values in columns.items())
        lines.append(f"{label:5} {_short(names[label]):{width}}" + "".join(values))
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
    """Draw a page of pictures, each under its label, as PNG. Needs matplotlib.

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
    from matplotlib.figure import Figure

    rows = max(1, -(-len(pictures) // _COLUMNS))
    figure = Figure(figsize=(_COLUMNS * 1.3, rows * 1.5), layout="constrained", dpi=100)
    for place, (picture, label) in enumerate(zip(pictures, labels, strict=True), 1):
        axes = figure.add_subplot(rows, _COLUMNS, place)
        pixels: Any = np.asarray(picture)
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255 if pixels.dtype == np.uint8 else 1)
        axes.set_axis_off()
        axes.set_title(_short(label, 18), fontsize=8, pad=2, parse_math=False)
    with warnings.catch_warnings():
        # Its font has no letters of some languages; the picture is useful without them.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(path, format="png")


def _short(name: str, longest: int = _LONGEST_NAME) -> str:
    text = shown(name)
    return text if len(text) <= longest else text[: longest - 3] + "..."
