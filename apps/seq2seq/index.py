"""An index of parallel text: where each pair of lines starts, and how long it is."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from chainermn.datasets.names import shown
from chainermn.datasets.texts import Form, lines_in
from chainermn.files import open_regular
from chainermn.progress import Progress
from vocabulary import tokenize

# Columns of an index, which has a row for each pair of lines.
SOURCE_AT, TARGET_AT, SOURCE_LENGTH, TARGET_LENGTH = range(4)  # bytes into a file, tokens


def build_index(
    paths: tuple[Path, Path],
    names: tuple[Path, Path],
    max_length: int,
    form: Form = "NFC",
    split: Callable[[str], list[str]] = tokenize,
) -> tuple[np.ndarray, list[Counter[str]], dict[str, int]]:
    """Read two files once, with a progress bar.

    Parameters
    ----------
    paths : tuple of Path
        Source and target, not gzipped.
    names : tuple of Path
        What messages call them: the files that they were unpacked from.
    max_length : int
        Number of tokens; pairs with more on one side are skipped.
    form : {'NFC', None}
        Normal form of Unicode for the lines; see `chainermn.datasets.texts`.
    split : callable
        Function that divides a line into tokens.

    Returns
    -------
    index : array of int64, shape (pairs, 4)
    counts : list of Counter
        How often each token occurs in the source, and in the target.
    skipped : dict
        Number of unusable pairs of lines, by reason.

    Raises
    ------
    OSError, ValueError
        If the files cannot be read, are no text in UTF-8, have different numbers of lines, fewer
        than two pairs, or a line of more than a million bytes.
    """
    rows: list[np.ndarray] = []
    chunk: list[tuple[int, int, int, int]] = []
    counts: list[Counter[str]] = [Counter(), Counter()]
    skipped = {"empty": 0, "not UTF-8": 0, "too long": 0}
    bar = Progress(paths[0].stat().st_size, "vocabulary")
    at, lines = [0, 0], [0, 0]
    with open_regular(paths[0]) as sources, open_regular(paths[1]) as targets:
        sides = [
            lines_in(file, name, form=form)
            for file, name in zip((sources, targets), names, strict=True)
        ]
        while True:
            raw, texts = zip(*(next(side, (b"", None)) for side in sides), strict=True)
            if not all(raw):
                break
            tokens = [split(text) for text in texts if text is not None]
            lengths = [len(side) for side in tokens]
            if len(tokens) < 2:
                skipped["not UTF-8"] += 1
            elif not all(lengths):
                skipped["empty"] += 1
            elif max(lengths) > max_length:
                skipped["too long"] += 1
            else:
                chunk.append((*at, *lengths))
                for count, side in zip(counts, tokens, strict=True):
                    count.update(side)
            at = [position + len(line) for position, line in zip(at, raw, strict=True)]
            lines = [number + 1 for number in lines]
            if len(chunk) == 100_000:  # tuples take ten times the memory of an array
                rows.append(np.array(chunk, np.int64))
                chunk = []
            bar.step(len(raw[0]))
        lines = [
            n + sum(1 for _ in side) + bool(line)
            for n, side, line in zip(lines, sides, raw, strict=True)
        ]
    source, target = map(shown, names)
    if lines[0] != lines[1]:
        raise ValueError(
            f"the files must be translations line for line, but {source} has {lines[0]} lines "
            f"and {target} has {lines[1]}"
        )
    rows.append(np.array(chunk, np.int64).reshape(-1, 4))
    index = np.concatenate(rows)
    skipped = {reason: n for reason, n in skipped.items() if n}
    if len(index) < 2:
        raise ValueError(
            f"{source} and {target} need two pairs of lines or more, one to train on and one to "
            f"validate with, but have {len(index)} (skipped: {skipped or 'none'})"
        )
    return index, counts, skipped
