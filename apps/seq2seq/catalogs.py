"""Translated messages of programs, from gettext's catalogs (.po and .mo)."""

import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainermn.files import open_regular, open_tar

Pair = tuple[str, str]  # English, and its translation

MOST_BYTES = 1 << 26  # of a catalog; the largest of Debian have 3 million

ACCELERATOR = re.compile(r"[_&](?=\w)(?!\w+;)")  # before a letter of a menu, but not in &lt;
LETTER = re.compile(r"[^\W\d_]")
# Folders between a package's own and its catalog.
USUAL_FOLDERS = {"LC_MESSAGES", "i18n", "locale", "locales", "po", "translations"}


@dataclass
class Messages:
    """Messages that have been read.

    Attributes
    ----------
    packages : dict of list of tuple
        The pairs of each package, each pair once.
    catalogs : int
        Number of files that they come from.
    skipped : Counter
        Number of skipped messages, by reason.
    """

    packages: dict[str, list[Pair]] = field(default_factory=dict)
    catalogs: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def read(self, path: Path, package: str, max_characters: int) -> None:
        """Add the messages of a catalog.

        Raises
        ------
        ModuleNotFoundError
            If polib is not installed.
        ValueError
            If the file is damaged.
        """
        self.catalogs += 1
        found = []
        for entry in _open(path):
            for pair in _pairs(entry):
                pair = normalize(*pair)
                reason = _fault(entry, pair, max_characters)
                if reason:
                    self.skipped[reason] += 1
                else:
                    found.append(pair)
        self.packages[package] = list(dict.fromkeys([*self.packages.get(package, []), *found]))


def normalize(source: str, target: str) -> Pair:
    """Return a pair without accelerators and line breaks.

    The mark of an accelerator, ``_`` or ``&``, is taken out if there is one in the source and at
    most one in the target. White space becomes single spaces.
    """
    if len(ACCELERATOR.findall(source)) == 1 and len(ACCELERATOR.findall(target)) <= 1:
        source, target = ACCELERATOR.sub("", source), ACCELERATOR.sub("", target)
    return " ".join(source.split()), " ".join(target.split())


@contextmanager
def find_catalogs(paths: Iterable[Path], language: str) -> Iterator[list[tuple[Path, str]]]:
    """Find catalogs of a language, and the names of their packages.

    Parameters
    ----------
    paths : iterable of Path
        Catalogs of the language, folders, and Debian packages (.deb). In a folder, a catalog is of
        the language if it, or a folder on the way to it, has the language's name.
    language : str
        Language, such as ``de``.

    Yields
    ------
    list of (Path, str)
        Catalogs, with the names of their packages. Those from Debian packages are unpacked, and
        deleted afterwards.

    Raises
    ------
    OSError, ValueError
        If something cannot be read.
    """
    found: list[tuple[Path, str]] = []
    with tempfile.TemporaryDirectory() as unpacked:
        for path in paths:
            if path.suffix == ".deb":
                folder = Path(unpacked, path.name)
                _unpack(path, folder)
                package = path.name.partition("_")[0]
                found += [(file, package) for file in _of_language(folder, language)]
            elif path.is_dir():
                files = _of_language(path, language)
                found += [(file, _package(file, language)) for file in files]
            else:
                open_regular(path).close()  # raises if it cannot be read
                found.append((path, _package(path, language)))
        yield found


def _of_language(folder: Path, language: str) -> list[Path]:
    files = (f for f in sorted(folder.rglob("*")) if f.suffix in (".mo", ".po") and f.is_file())
    return [f for f in files if language in f.relative_to(folder).with_suffix("").parts]


def _package(file: Path, language: str) -> str:
    """Return the name of a catalog, or of its folder if it is named by its language."""
    names = [file.stem, *(folder.name for folder in file.resolve().parents)]
    return next(name for name in names if name not in USUAL_FOLDERS | {language})


def _unpack(package: Path, folder: Path) -> None:
    """Unpack the catalogs of a Debian package."""
    command = ["dpkg-deb", "--fsys-tarfile", str(package.resolve())]  # never begins with "-"
    n_bytes = 0
    try:
        with (
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process,
            open_tar(process.stdout) as archive,
        ):
            for member in archive:
                if member.isfile() and member.name.endswith((".mo", ".po")):
                    n_bytes += member.size
                    if member.size > MOST_BYTES or n_bytes > 100 * MOST_BYTES:
                        raise ValueError(f"{package}: catalogs of {n_bytes} bytes and more")
                    name = Path(member.name.lstrip("/"))
                    if ".." in name.parts:
                        raise ValueError(f"{package}: {name} leads out of the package")
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(archive.extractfile(member).read())
    except FileNotFoundError:
        raise ValueError(f"{package}: unpacking needs dpkg-deb; give unpacked folders") from None
    except tarfile.TarError as error:
        raise ValueError(f"{package}: not a Debian package ({error})") from None


def _open(path: Path) -> Any:
    try:
        import polib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("catalogs need polib: pip install polib") from None
    read = polib.mofile if path.suffix == ".mo" else polib.pofile
    open_regular(path, MOST_BYTES).close()
    try:
        return read(str(path))
    except Exception as error:  # polib raises all kinds of exceptions
        raise ValueError(f"{path}: not a catalog of gettext ({error})") from None


def _pairs(entry: Any) -> Iterator[Pair]:
    if not entry.msgid_plural:
        yield entry.msgid, entry.msgstr
        return
    forms = [text for _, text in sorted(entry.msgstr_plural.items())]
    if forms:
        # Languages may have one form or several: the first is for one, the last for many.
        yield entry.msgid, forms[0]
        yield entry.msgid_plural, forms[-1]


def _fault(entry: Any, pair: Pair, max_characters: int) -> str:
    if getattr(entry, "obsolete", False):
        return "obsolete"
    if "fuzzy" in getattr(entry, "flags", ()):
        return "fuzzy"
    if not all(pair):
        return "empty"
    if not all(map(LETTER.search, pair)):
        return "without letters"
    if max(map(len, pair)) > max_characters:
        return "too long"
    return ""
