"""Lines of text in UTF-8, with or without a byte order mark, gzipped or not.

The content of a file decides, not its name. Lines end with LF or CRLF, and with nothing else.
Files in another encoding, such as UTF-16, are refused. Single lines that are not UTF-8 are None,
so that they can be left out and counted.
"""

from __future__ import annotations

import gzip
import io
import os
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, cast

from chainermn import files
from chainermn.datasets.stamps import Stamp

__all__ = [
    "LONGEST_LINE",
    "Form",
    "LinesAt",
    "decode",
    "raw_lines",
    "read_lines",
    "stamp_of",
    "unpacked",
]

#: Largest size of a line, in bytes: a file without line breaks must not fill the memory.
LONGEST_LINE = 1_000_000
# Text compresses to about a tenth. More than a gigabyte compressed to a hundredth is refused.
SMALL, MOST_TIMES = 1 << 30, 100

_GZIP = b"\x1f\x8b"
# First bytes of files: what they are, and what makes text in UTF-8 of them.
_OTHERS = {
    b"\xff\xfe\0\0": ("UTF-32", "iconv -f UTF-32 -t UTF-8 FILE > NEW"),
    b"\0\0\xfe\xff": ("UTF-32", "iconv -f UTF-32 -t UTF-8 FILE > NEW"),
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    b"BZh91AY&SY": ("bzip2", "bunzip2 FILE"),
    b"\xfd7zXZ\0": ("xz", "unxz FILE"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd FILE"),
    b"PK\3\4": ("zip", "unzip FILE"),
}

Form = Literal["NFC"] | None


def decode(line: bytes, form: Form = "NFC") -> str | None:
    r"""Return the text of a line without the white space around it, or None if it is not UTF-8.

    A byte order mark at the start is left out. Files that were put together have several.

    Parameters
    ----------
    line : bytes
    form : {'NFC', None}
        Normal form of Unicode. NFC makes one letter of a letter and its accent, which macOS
        writes as two; None leaves them as they are.

    Examples
    --------
    >>> from chainermn.datasets import texts
    >>> texts.decode("\ufeffu\u0308ber\r\n".encode()), texts.decode("über".encode("latin-1"))
    ('über', None)
    """
    try:
        text = line.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None
    return (unicodedata.normalize(form, text) if form else text).strip()


def raw_lines(
    file: BinaryIO, name: str | os.PathLike[str], most: int = LONGEST_LINE
) -> Iterator[bytes]:
    r"""Yield the lines of an open file, unpacked, with their line breaks; see `decode`.

    Parameters
    ----------
    file : binary file
        File to read from its start, buffered: from ``open``, or ``sys.stdin.buffer``.
    name : path
        Name of the file in errors.
    most : int
        Largest size of a line in bytes, including its line break.

    Raises
    ------
    ValueError
        If the file is gzipped and damaged, is not text in UTF-8 (but UTF-16, or packed by
        another program), or has a longer line.

    Examples
    --------
    >>> import io
    >>> from chainermn.datasets import texts
    >>> file = io.BufferedReader(io.BytesIO("a few words\n".encode("utf-16")))
    >>> list(texts.raw_lines(file, "words.txt"))
    Traceback (most recent call last):
    ValueError: words.txt:1: expected text in UTF-8, got UTF-16. This makes it: iconv -f UTF-16 ...
    """
    if _is_packed(file):
        file = cast(BinaryIO, gzip.GzipFile(fileobj=file))
    lines = files.read_lines(file, name, most)
    at = 0
    try:
        for number, line in enumerate(lines, 1):
            found = _other(line, at)
            if found:
                raise ValueError(
                    f"{name}:{number}: expected text in UTF-8, got {found[0]}. This makes it: "
                    f"{found[1]}"
                )
            at += len(line)
            yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}: damaged gzip file ({error})") from None


def read_lines(path: Path, most: int = LONGEST_LINE, form: Form = "NFC") -> Iterator[str | None]:
    r"""Yield the text of each line of a file; see `decode` and `raw_lines`.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, and for the reasons of `raw_lines`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from chainermn.datasets import texts
    >>> if comm.rank == 0:
    ...     n = Path("words.txt").write_bytes("café\u2028bar\r\nfew".encode())
    ...     print(list(texts.read_lines(Path("words.txt"))))
    ['café\u2028bar', 'few']
    """
    with files.open_regular(path) as file:
        for line in raw_lines(file, path, most):
            yield decode(line, form)


def unpacked(path: Path, folder: Path) -> Path:
    """Return a file with the same lines that `LinesAt` can read: itself, or an unpacked copy.

    Parameters
    ----------
    path : Path
    folder : Path
        Folder for the copy, which is named by a digest of the packed content. If it is there
        already, it is used.

    Raises
    ------
    OSError, ValueError
        For the reasons of `raw_lines`, or if the file seems made to fill the disk.

    Examples
    --------
    >>> import gzip
    >>> from pathlib import Path
    >>> from chainermn.datasets import texts
    >>> if comm.rank == 0:
    ...     n = Path("words.gz").write_bytes(gzip.compress(b"a few words", mtime=0))
    ...     print(texts.unpacked(Path("words.gz"), Path()).read_text())
    a few words
    """
    path = path.resolve()
    with files.open_regular(path) as file:
        if not _is_packed(file):
            return path
    stamp = Stamp.of(path)
    copy = folder.resolve() / f"{stamp.digest[:32]}-{path.name.removesuffix('.gz')}"
    if copy.exists():
        return copy
    size, most = 0, max(SMALL, MOST_TIMES * stamp.size)
    with stamp.open() as packed, files.atomic_write(copy, "wb") as lines:
        for line in raw_lines(packed, path):
            size += lines.write(line)
            if size > most:
                raise ValueError(
                    f"{path}: more than {most} bytes are in it: no text is packed so well"
                )
        stamp.check(packed)
    return copy


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of a text that is not gzipped, for `LinesAt`.

    Raises
    ------
    OSError, ValueError
        For the reasons of `Stamp.of`, or if a line is so long that this is not text.

    Examples
    --------
    >>> from pathlib import Path
    >>> from chainermn.datasets import texts
    >>> if comm.rank == 0:
    ...     n = Path("words.txt").write_text("a few words")
    ...     print(texts.stamp_of(Path("words.txt")).size)
    11
    """
    number = 1

    def look(piece: bytes) -> None:
        nonlocal number
        if len(piece) > LONGEST_LINE and b"\n" not in piece:
            raise ValueError(f"{path}:{number}: expected a line of at most {LONGEST_LINE} bytes")
        number += piece.count(b"\n")

    return Stamp.of(path, look)


class LinesAt:
    r"""Reads lines of a file by their positions, and raises if the file has changed.

    Forked processes and threads may share it. If it is pickled, the other process opens the file
    itself.

    Parameters
    ----------
    stamp : Stamp
        The file, not gzipped, as it was when the positions were noted.
    form : {'NFC', None}
        Normal form of Unicode; see `decode`.

    Raises
    ------
    OSError, ValueError
        If there is no file any more, or it has changed; see `Stamp.check`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from chainermn.datasets import texts
    >>> if comm.rank == 0:
    ...     n = Path("words.txt").write_text("a few\nwords\n")
    ...     lines = texts.LinesAt(texts.stamp_of(Path("words.txt")))
    ...     print(lines.read(6))
    ...     lines.close()
    words
    """

    def __init__(self, stamp: Stamp, form: Form = "NFC") -> None:
        self.stamp, self.form = stamp, form
        self._file = stamp.open()

    def __reduce__(self) -> tuple[type[LinesAt], tuple[Stamp, Form]]:
        return LinesAt, (self.stamp, self.form)

    def read(self, at: int) -> str:
        """Return the text of the line at a position in bytes; this raises as the class does."""
        line = piece = b""
        try:
            while b"\n" not in piece and len(line) <= LONGEST_LINE:
                # Not by seek: others may share the position in the file.
                piece = os.pread(self._file.fileno(), 1 << 10, at + len(line))
                if not piece:
                    break
                line += piece
        except OSError as error:
            raise self.stamp.explain(error) from None
        text = decode(line.partition(b"\n")[0], self.form)
        # After reading: the file may have changed meanwhile.
        self.stamp.check(self._file)
        if not text:
            raise ValueError(f"{self.stamp.path}: no line of text at byte {at}: delete its index")
        return text

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_packed(file: BinaryIO) -> bool:
    return cast(io.BufferedReader, file).peek(len(_GZIP)).startswith(_GZIP)


def _other(line: bytes, at: int) -> tuple[str, str] | None:
    """Return what a line at a position seems to be, and what makes text of it; None for text."""
    if not at:
        for start, found in _OTHERS.items():
            if line.startswith(start):
                return found
    if b"\0" not in line:
        return None
    odd, even = (b"\0" in line[(at + first) % 2 :: 2] for first in (1, 0))
    form = "UTF-32LE" if odd and even else "UTF-16LE" if odd else "UTF-16BE"
    return f"NUL bytes, as in {form}", f"iconv -f {form} -t UTF-8 FILE > NEW"
