"""The files of a data set in a folder, and what of the folder is left out."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from chainermn.datasets.names import shown

__all__ = [
    "LEAST_SHARE",
    "Found",
    "check_classes",
    "find_classes",
    "find_files",
    "find_folders",
    "is_hidden",
]

#: A class of whose files a smaller share can be read is probably not meant to be like this.
LEAST_SHARE = 0.1

# What systems and programs put beside files, apart from names that begin with a dot.
_SYSTEM = frozenset(
    {
        "#recycle",
        "$recycle.bin",
        "@eadir",
        "__macosx",
        "desktop.ini",
        "ehthumbs.db",
        "lost+found",
        "system volume information",
        "thumbs.db",
    }
)


@dataclass
class Found:
    """The files of a folder.

    Attributes
    ----------
    files : list of str
        Paths of the files that have one of the endings, sorted as text in each folder.
    ignored : dict of list of str
        Paths of the other files, by ending in lower case; files without an ending under ``''``.
    hidden : int
        Number of files that are hidden or a system's, or in such folders.

    Examples
    --------
    >>> from chainermn.datasets.folders import Found
    >>> Found(["cat.jpg"], {".heic": ["dog.HEIC"]}).left_out()
    ['left out: 1 file .heic, such as dog.HEIC']
    """

    files: list[str] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    hidden: int = 0

    @classmethod
    def joined(cls, parts: Iterable[Found]) -> Found:
        """Return what was found in several folders."""
        total = cls()
        for part in parts:
            total.files += part.files
            total.hidden += part.hidden
            for ending, paths in part.ignored.items():
                total.ignored.setdefault(ending, []).extend(paths)
        return total

    def left_out(self, hint: Callable[[str], str] = lambda _: "", most: int = 3) -> list[str]:
        """Return lines that tell what was left out.

        Parameters
        ----------
        hint : callable
            Function from an ending to what to do about such files; empty for nothing.
        most : int
            Number of lines for endings; those of fewer files share the last one.
        """
        by_number = sorted(self.ignored.items(), key=lambda item: (-len(item[1]), item[0]))
        lines = []
        for ending, paths in by_number[:most]:
            what = _files(len(paths), f" {shown(ending)}" if ending else " without an ending")
            advice = f": {hint(ending)}" if hint(ending) else ""
            lines.append(f"left out: {what}, such as {shown(paths[0])}{advice}")
        if rest := by_number[most:]:
            endings = ", ".join(shown(ending) if ending else "none" for ending, _ in rest)
            n = sum(len(paths) for _, paths in rest)
            lines.append(f"left out: {_files(n)} of {len(rest)} other endings: {endings:.200}")
        if self.hidden:
            lines.append(f"left out: {_files(self.hidden)}, hidden or a system's")
        return lines

    def besides(self, hint: Callable[[str], str] = lambda _: "") -> str:
        """Return the end of an error: what was left out most, and what to do about it.

        Examples
        --------
        >>> from chainermn.datasets.folders import Found
        >>> "no image" + Found([], {".heic": ["dog.HEIC"]}).besides()
        'no image; left out: 1 file .heic, such as dog.HEIC'
        """
        lines = self.left_out(hint, 1)
        return f"; {lines[0]}" if lines else ""


def find_files(
    folder: str | os.PathLike[str], endings: Collection[str], below: bool = True
) -> Found:
    """Find the files of a folder that have one of some endings.

    Links are followed. Every file is in the result: found, ignored for its ending, or counted as
    hidden. Hidden are names that begin with a dot, and what systems leave behind, such as
    ``@eaDir`` and ``__MACOSX``.

    Parameters
    ----------
    folder : path
        Folder to search.
    endings : collection of str
        Endings in lower case, such as ``.jpg``; those of the files may be in any case.
    below : bool
        Whether to search the folders in it, too, apart from hidden ones.

    Raises
    ------
    OSError
        If a folder cannot be read.
    ValueError
        If two folders are the same, because one is a link.

    Examples
    --------
    >>> from chainermn.datasets import folders
    >>> if comm.rank == 0:
    ...     for name in ("b.JPG", "a.jpg", "c.HEIC", ".d.jpg"):
    ...         with chainermn.files.atomic_write(name) as file:
    ...             pass
    ...     found = folders.find_files(".", {".jpg"})
    ...     print(found.files, found.ignored, found.hidden)
    ['./a.jpg', './b.JPG'] {'.heic': ['./c.HEIC']} 1
    """
    return _find(folder, endings, below, {})


def find_folders(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the folders in a folder, sorted as text, without hidden ones.

    Examples
    --------
    >>> import pathlib
    >>> from chainermn.datasets import folders
    >>> if comm.rank == 0:
    ...     for name in ("10", "2", "@eaDir"):
    ...         pathlib.Path(name).mkdir()
    ...     print(folders.find_folders("."))
    ['10', '2']
    """
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not is_hidden(e.name))


def find_classes(
    parent: str | os.PathLike[str],
    names: Iterable[str],
    endings: Collection[str],
    hint: Callable[[str], str] = lambda _: "",
) -> dict[str, Found]:
    """Find the files of classes that have a folder each; see `find_files`.

    Parameters
    ----------
    parent : path
        Folder with the folders of the classes.
    names : iterable of str
        Names of these.
    endings : collection of str
        Endings of the files in lower case.
    hint : callable
        Function from another ending to what to do about such files; empty for nothing.

    Returns
    -------
    dict of Found
        By the names of the folders, in their order.

    Raises
    ------
    OSError
        If a folder cannot be read, or has no such file.
    ValueError
        If two folders are the same, also below those of two classes, because one is a link; or if
        two names look alike, as their letters with accents are encoded in two ways.

    Examples
    --------
    >>> import pathlib
    >>> from chainermn.datasets import folders
    >>> if comm.rank == 0:
    ...     for name in ("cat", "dog"):
    ...         pathlib.Path(name).mkdir()
    ...         pathlib.Path(name, "0.png").touch()
    ...     found = folders.find_classes(".", folders.find_folders("."), {".png"})
    ...     print({name: part.files for name, part in found.items()})
    {'cat': ['./cat/0.png'], 'dog': ['./dog/0.png']}
    """
    found, seen, known = dict[str, Found](), dict[str, str](), dict[str, str]()
    for name in names:
        folder = os.path.join(parent, name)
        other = known.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise ValueError(
                f"{shown(parent)}: the folders {other!a} and {name!a} look alike: rename one"
            )
        found[name] = _find(folder, endings, True, seen)
        if not found[name].files:
            besides = found[name].besides(hint)
            raise FileNotFoundError(f"{shown(folder)} contains no image{besides}")
    return found


def check_classes(
    parent: str | os.PathLike[str],
    found: Mapping[str, Found],
    hint: Callable[[str], str] = lambda _: "",
) -> None:
    """Raise ValueError if there is one class, or one with hardly a file that can be read.

    Parameters
    ----------
    parent : path
        Folder with the folders of the classes.
    found : mapping of Found
        What `find_classes` has found in it.
    hint : callable
        Function from another ending to what to do about such files; empty for nothing.

    Raises
    ------
    ValueError
        If there are not several classes, or less than a tenth of the files of one have the right
        ending.

    Examples
    --------
    >>> from chainermn.datasets.folders import Found, check_classes
    >>> check_classes("animals", {"cat": Found(["0.png"])})
    Traceback (most recent call last):
    ValueError: animals has one class, cat, which would always be right: ...
    """
    if len(found) == 1:
        raise ValueError(
            f"{shown(parent)} has one class, {shown(*found)}, which would always be right: "
            "give the folder that has the folders of all classes"
        )
    for name, part in found.items():
        total = len(part.files) + sum(map(len, part.ignored.values()))
        if len(part.files) < LEAST_SHARE * total:
            raise ValueError(
                f"{shown(os.path.join(parent, name))}: only {len(part.files)} of {total} files "
                f"can be read{part.besides(hint)}"
            )


def is_hidden(name: str) -> bool:
    """Tell whether a name is that of a hidden file or folder, or of one that a system makes.

    Examples
    --------
    >>> from chainermn.datasets import folders
    >>> folders.is_hidden("__MACOSX"), folders.is_hidden("cat")
    (True, False)
    """
    return name.startswith(".") or name.lower() in _SYSTEM


def _find(
    folder: str | os.PathLike[str], endings: Collection[str], below: bool, seen: dict[str, str]
) -> Found:
    found = Found()
    for place, inner, names in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(place)
        if real in seen:
            raise ValueError(
                f"{shown(seen[real])} and {shown(place)} are the same folder (one is a link): "
                "remove one"
            )
        seen[real] = place
        visible = sorted(name for name in inner if not is_hidden(name))
        for name in set(inner).difference(visible):
            found.hidden += sum(1 for _ in _all_files(os.path.join(place, name)))
        inner[:] = visible if below else []
        begin = os.path.join(place, "")
        for name in sorted(names):
            dot = name.rfind(".")
            ending = name[dot:].lower() if dot > 0 else ""
            if is_hidden(name):
                found.hidden += 1
            elif ending in endings:
                found.files.append(begin + name)
            else:
                found.ignored.setdefault(ending, []).append(begin + name)
    return found


def _all_files(folder: str) -> Iterator[str]:
    for _, _, names in os.walk(folder):
        yield from names


def _refuse(error: OSError) -> None:
    raise error


def _files(n: int, kind: str = "") -> str:
    return f"{n} file{kind}" if n == 1 else f"{n} files{kind}"
