"""Names of classes, in the order of the labels that count them from 0.

A name may be anything that a folder can be called, even if it is not UTF-8: bytes that are not
become surrogates, as in Python's own names of files.
"""

from __future__ import annotations

import os
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chainermn.files import atomic_write, read_bytes

__all__ = [
    "check_labels",
    "format_names",
    "naturally_sorted",
    "parse_names",
    "read_names",
    "shown",
    "write_names",
]

_MOST_BYTES = 1 << 26
# U+200C and U+200D, as in Persian, Hindi and emoji. Elsewhere they would make equal-looking names.
_JOINERS = re.compile(r"(?<=[^\0-\x7f])[\u200c\u200d](?=[^\0-\x7f])")


def read_names(path: str | os.PathLike[str], most: int = 100_000) -> list[str]:
    r"""Return the names in a file, one on each line.

    Lines end with LF or CRLF, and with nothing else, so a name may hold any other character.

    Parameters
    ----------
    path : path
        File to read, in UTF-8, with or without a byte order mark.
    most : int
        Largest number of names.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If a line is blank, if there are no names or too many, or if the file is UTF-16 or its
        lines end with CR alone.

    Examples
    --------
    >>> from chainermn.datasets import names
    >>> if comm.rank == 0:
    ...     names.write_names("classes.txt", ["fire engine", "blue\u2028jay"])
    ...     print(names.read_names("classes.txt"))
    ['fire engine', 'blue\u2028jay']
    """
    return parse_names(read_bytes(path, _MOST_BYTES), path, most)


def parse_names(content: bytes, source: str | os.PathLike[str], most: int = 100_000) -> list[str]:
    r"""Return the names in the content of a file; see `read_names`.

    Examples
    --------
    >>> from chainermn.datasets import names
    >>> names.parse_names(b"cat\n\ndog\n", "classes.txt")
    Traceback (most recent call last):
    ValueError: classes.txt:2: expected the name of a class, got a blank line, which would ...
    """
    if b"\0" in content:
        raise ValueError(
            f"{source}: expected UTF-8, got NUL bytes: it seems to be UTF-16; "
            "iconv -f UTF-16 -t UTF-8 FILE > NEW converts it"
        )
    if b"\r" in content and b"\n" not in content:
        raise ValueError(
            f"{source}: expected lines that end with LF or CRLF, got CR: "
            "tr '\\r' '\\n' < FILE > NEW converts it"
        )
    lines = content.removeprefix(BOM_UTF8).split(b"\n")
    if not lines[-1]:
        lines.pop()
    if not 1 <= len(lines) <= most:
        raise ValueError(f"{source}: expected 1 to {most} names, got {len(lines)}")
    names = [os.fsdecode(line.removesuffix(b"\r")) for line in lines]
    for number, name in enumerate(names, 1):
        if not name.strip():
            raise ValueError(
                f"{source}:{number}: expected the name of a class, got a blank line, which would "
                "give every class after it the name of another: delete the line"
            )
    return names


def write_names(path: str | os.PathLike[str], names: Sequence[str]) -> None:
    r"""Write names so that `read_names` returns the same.

    Raises
    ------
    OSError
        If the file cannot be written.
    ValueError
        If a name is blank or has a line break, which no line can hold.

    Examples
    --------
    >>> from chainermn.datasets import names
    >>> names.write_names("classes.txt", ["two\nlines"])
    Traceback (most recent call last):
    ValueError: classes.txt: no line can hold the name 'two\nlines': rename it
    """
    content = format_names(names, path)
    with atomic_write(path, "wb") as file:
        file.write(content)


def format_names(names: Sequence[str], source: str | os.PathLike[str]) -> bytes:
    r"""Return the content of a file of names, before it is written; see `write_names`.

    Examples
    --------
    >>> from chainermn.datasets import names
    >>> names.format_names(["cat", "dog"], "classes.txt")
    b'cat\ndog\n'
    """
    for name in names:
        if "\n" in name or name.endswith("\r") or not name.strip():
            raise ValueError(f"{source}: no line can hold the name {name!a}: rename it")
    content = os.fsencode("".join(f"{name}\n" for name in names))
    # Or a mark that belongs to the first name would be lost.
    return BOM_UTF8 * content.startswith(BOM_UTF8) + content


def check_labels(
    labels: ArrayLike,
    names: Sequence[str],
    source: str | os.PathLike[str],
    several: bool = False,
) -> NDArray[Any]:
    """Return how many examples each class has, if every label has a name.

    Parameters
    ----------
    labels : array of int, shape (examples,)
        Labels from 0.
    names : sequence of str
        Names of the classes.
    source : path
        Name of the file with the labels, for errors.
    several : bool
        Whether to refuse labels that are all the same.

    Returns
    -------
    array of int64, shape (names,)

    Raises
    ------
    ValueError
        If a label is not smaller than the number of names; the message tells if labels seem to
        begin at 1. If all labels are the same, and ``several`` is true.

    Examples
    --------
    >>> from chainermn.datasets import names
    >>> names.check_labels([0, 1, 1], ["cat", "dog", "cow"], "train.txt")
    array([1, 2, 0])
    >>> names.check_labels([1, 2, 3], ["cat", "dog", "cow"], "train.txt")
    Traceback (most recent call last):
    ValueError: train.txt: expected labels from 0 to 2 for 3 names, got 1 to 3: ...
    """
    labels = np.asarray(labels, np.int64)
    if labels.size and not 0 <= labels.min() <= labels.max() < len(names):
        low, high = labels.min(), labels.max()
        hint = "give a name for each class, or correct the labels"
        if (low, high) == (1, len(names)):
            hint = (
                "they seem to begin at 1, so each class would get the name of the next: subtract "
                "1 from every label, in all lists"
            )
        raise ValueError(
            f"{source}: expected labels from 0 to {len(names) - 1} for {len(names)} names, "
            f"got {low} to {high}: {hint}"
        )
    counts = np.bincount(labels, minlength=len(names))
    if several and np.count_nonzero(counts) < 2:
        raise ValueError(
            f"{source}: expected examples of several classes, got {labels.size}, all of one: "
            "that class would always be right"
        )
    return counts


def naturally_sorted(names: Sequence[str]) -> list[str]:
    """Return names sorted as people count: 2 before 10.

    Folders sort as text, so 10 comes before 2. Where the two differ, a file of names is right for
    only one of them.

    Examples
    --------
    >>> from chainermn.datasets import names
    >>> sorted(["1", "2", "10"]), names.naturally_sorted(["1", "10", "2"])
    (['1', '10', '2'], ['1', '2', '10'])
    """

    def key(name: str) -> list[tuple[bool, int, str]]:
        parts = re.split(r"([0-9]+)", name)
        return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]

    return sorted(names, key=key)


def shown(name: str | os.PathLike[str]) -> str:
    r"""Return a name or a line for messages and terminals: quoted where it could mislead.

    What cannot be seen is escaped, except joiners inside words, and so is what standard output
    cannot show.

    Examples
    --------
    >>> from chainermn.datasets import names
    >>> print(names.shown("fire engine"), names.shown("blue\u2028jay"), names.shown(" cat"))
    fire engine 'blue\u2028jay' ' cat'
    """
    text = os.fspath(name)
    if not _JOINERS.sub("", text).isprintable() or text != text.strip() or not text:
        text = repr(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
