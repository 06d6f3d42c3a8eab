"""Lines of text in UTF-8, with or without a byte order mark, gzipped or not.

The content of a file decides, not its name. Lines end with LF or CRLF, and with nothing else.
Files in another encoding, such as UTF-16, are refused. Single lines that are not UTF-8 are None,
so that they can be left out, and one sentence says how many they are.
"""

from __future__ import annotations

import io
import os
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, cast

from chainermn import files
from chainermn.datasets.names import shown
from chainermn.datasets.stamps import Stamp

__all__ = ["LONGEST_LINE", "Form", "LinesAt", "lines_in", "read_lines", "unpacked"]

#: Largest size of a line, in bytes: a file without line breaks must not fill the memory.
LONGEST_LINE = 1_000_000

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
    b"%PDF-": ("PDF", "pdftotext FILE NEW"),
    files.GZIP: ("gzip in gzip", "gunzip FILE"),
}
# Line breaks of encodings with NUL bytes. No other character tells them apart.
_BREAKS = {
    "UTF-32LE": b"\n\0\0\0",
    "UTF-32BE": b"\0\0\0\n",
    "UTF-16LE": b"\n\0",
    "UTF-16BE": b"\0\n",
}

Form = Literal["NFC"] | None


def lines_in(
    file: BinaryIO,
    name: str | os.PathLike[str],
    most: int = LONGEST_LINE,
    form: Form = "NFC",
    say: Callable[[str], object] = print,
) -> Iterator[tuple[bytes, str | None]]:
    r"""Yield the lines of an open file, unpacked, each with its text.

    The text has no white space around it, and no byte order mark at its start, of which files that
    were put together have several. It is None if the line is not UTF-8.

    Parameters
    ----------
    file : binary file
        File to read from its start, buffered: from ``open``, or ``sys.stdin.buffer``.
    name : path
        Name of the file in messages.
    most : int
        Largest size of a line in bytes, including its line break.
    form : {'NFC', None}
        Normal form of Unicode. NFC makes one letter of a letter and its accent, which macOS
        writes as two; None leaves them as they are.
    say : callable
        Function that is called at the end, with one sentence, if lines are not UTF-8.

    Raises
    ------
    ValueError
        If the file is gzipped and damaged, is not text in UTF-8 (but UTF-16, or packed by
        another program), or has a longer line; at the end, if more than half of its lines are not
        UTF-8, or lines end with CR.

    Examples
    --------
    >>> import io
    >>> from chainermn.datasets import texts
    >>> file = io.BufferedReader(io.BytesIO(b"\xfcber\n\xef\xbb\xbfu\xcc\x88ber\r\n"))
    >>> if comm.rank == 0:
    ...     print([text for _, text in texts.lines_in(file, "words.txt")])
    words.txt:1: not UTF-8 (1 of 2 lines, which are left out). If this is Latin-1: iconv ...
    [None, 'über']
    """
    name = shown(name)
    number = n_breaks = n_returns = first_return = n_invalid = first_invalid = 0
    line = b""
    with files.as_unpacked(file, name) as file:
        begin = cast(io.BufferedReader, file).peek(1 << 12)
        for number, line in enumerate(iter(partial(file.readline, most + 1), b""), 1):
            found = _other(line, begin, number)
            if found:
                raise ValueError(f"{name}:{number}: expected text in UTF-8, got {found}")
            n_breaks += line.endswith(b"\n")
            if b"\r" in line:
                n_returns += line.count(b"\r") - line.endswith(b"\r\n")
                first_return = first_return or (n_returns and number)
            if len(line) > most:
                break
            text = _decode(line, form)
            if text is None:
                n_invalid += 1
                first_invalid = first_invalid or number
            yield line, text
    # Some belong to a line; but not as many.
    if 2 * n_returns > n_breaks + 1:
        raise ValueError(
            f"{name}:{first_return}: expected lines that end with LF or CRLF, got CR, as on old "
            r"Macs. This makes them: perl -pe 's/\r\n?/\n/g' FILE > NEW"
        )
    if len(line) > most:
        raise ValueError(f"{name}:{number}: expected a line of at most {most} bytes")
    remedy = (
        "If this is Latin-1: iconv -f LATIN1 -t UTF-8 FILE > NEW (iconv -l lists other encodings)"
    )
    if 2 * n_invalid > number:
        raise ValueError(
            f"{name}:{first_invalid}: expected text in UTF-8, got another encoding "
            f"({n_invalid} of {number} lines). {remedy}"
        )
    if n_invalid:
        say(
            f"{name}:{first_invalid}: not UTF-8 ({n_invalid} of {number} lines, which are left "
            f"out). {remedy}"
        )


def read_lines(path: Path, most: int = LONGEST_LINE, form: Form = "NFC") -> Iterator[str | None]:
    r"""Yield the text of each line of a file; see `lines_in`.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, and for the reasons of `lines_in`.

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
        for _, text in lines_in(file, path, most, form):
            yield text


def unpacked(path: Path, folder: Path, most: int = 1 << 30) -> Stamp:
    """Return a file with the same lines that `LinesAt` can read: itself, or an unpacked copy.

    Parameters
    ----------
    path : Path
    folder : Path
        Folder for the copy. Its name has digests of the packed content and of its own: it is used
        again only while both are the same.
    most : int
        Size in bytes from which text may not be more than a hundred times as large as packed. It
        usually is ten times as large.

    Raises
    ------
    OSError, ValueError
        For the reasons of `lines_in`, or if the file seems made to fill the disk.

    Examples
    --------
    >>> import gzip
    >>> from pathlib import Path
    >>> from chainermn.datasets import texts
    >>> if comm.rank == 0:
    ...     n = Path("words.gz").write_bytes(gzip.compress(b"a few words", mtime=0))
    ...     print(texts.unpacked(Path("words.gz"), Path()).path.read_text())
    a few words
    """
    with files.open_regular(path) as file:
        is_packed = files.is_gzipped(file)
        next(lines_in(file, path), None)  # so that no terabyte is read to refuse it
    stamp, folder = Stamp.of(path.resolve()), folder.resolve()
    if not is_packed:
        return stamp
    begin = f"{stamp.digest[:32]}-"
    for copy in folder.glob(f"{begin}*"):
        found = Stamp.of(copy)
        if copy.name == begin + found.digest[:32]:
            return found
    size, most = 0, max(most, 100 * stamp.size)
    with tempfile.TemporaryDirectory(dir=folder) as new:
        lines = Path(new, "lines")
        with stamp.open() as packed, files.atomic_write(lines, "wb") as file:
            for line, _ in lines_in(packed, path, say=lambda _: None):
                size += file.write(line)
                if size > most:
                    raise ValueError(
                        f"{shown(path)}: more than {most} bytes are in it: no text is packed so "
                        "well"
                    )
            stamp.check(packed)
        made = Stamp.of(lines)
        return replace(made, path=lines.replace(folder / (begin + made.digest[:32])))


class LinesAt:
    r"""Reads lines of a file by their positions, and raises if the file has changed.

    Forked processes and threads may share it. If it is pickled, the other process opens the file
    itself.

    Parameters
    ----------
    stamp : Stamp
        The file, not gzipped, as it was when the positions were noted.
    form : {'NFC', None}
        Normal form of Unicode; see `lines_in`.

    Raises
    ------
    OSError, ValueError
        If there is no file any more, or it has changed; see `Stamp.check`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from chainermn.datasets import texts
    >>> from chainermn.datasets.stamps import Stamp
    >>> if comm.rank == 0:
    ...     n = Path("words.txt").write_text("a few\nwords\n")
    ...     lines = texts.LinesAt(Stamp.of(Path("words.txt")))
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
        text = _decode(line.partition(b"\n")[0], self.form)
        # After reading: the file may have changed meanwhile.
        self.stamp.check(self._file)
        if not text:
            path = shown(self.stamp.path)
            raise ValueError(f"{path}: no line of text at byte {at}: delete its index")
        return text

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _decode(line: bytes, form: Form) -> str | None:
    try:
        text = line.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None
    return (unicodedata.normalize(form, text) if form else text).strip()


def _other(line: bytes, begin: bytes, number: int) -> str:
    """Return what a line seems to be, and what makes text of it; nothing for text."""
    if number == 1:
        for start, (form, remedy) in _OTHERS.items():
            if line.startswith(start):
                return f"{form}. This makes it: {remedy}"
    form = ""
    if b"\x1b$" in line:
        form, what = "ISO-2022-JP", "escape sequences"
    elif b"\0" in line:
        what = "NUL bytes"
        for name, end in _BREAKS.items():
            size = len(end)
            if any(begin[i : i + size] == end for i in range(0, len(begin), size)):
                form = name
                break
    else:
        return ""
    if not form:
        return f"{what}: it is damaged, or no text"
    return f"{what}, as in {form}. This makes it: iconv -f {form} -t UTF-8 FILE > NEW"
