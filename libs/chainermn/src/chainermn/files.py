"""Write files completely or not at all, and read files from people you do not trust.

The functions that read use no more memory than the caller allows, and never wait for a pipe. Their
errors name the file, and the line or the key.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import reprlib
import secrets
import shlex
import stat
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import IO, Any, BinaryIO, NoReturn

# Bytes of a tar file that Python may read to find a member: no path has more than 4096.
_MOST_BYTES_OF_HEADERS = 1 << 13
# First bytes of a gzipped file.
GZIP = b"\x1f\x8b"
# Each member may have extended headers; only the number of those for all members is limited.
_MOST_FOR_ALL_MEMBERS = 100


def optional_path(text: str) -> Path | None:
    """Return a path, or None for an empty string: the ``type`` of a flag that may be left out.

    Examples
    --------
    >>> import argparse
    >>> parser = argparse.ArgumentParser()
    >>> flag = parser.add_argument("--data", type=chainermn.files.optional_path)
    >>> parser.parse_args(["--data", ""])
    Namespace(data=None)
    """
    return Path(text) if text else None


# Exceptions that tell users of a program about their input; others tell of a bug.
WRONG_INPUT = (ImportError, OSError, RuntimeError, ValueError)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """End the program with a one-line message if the ``with`` block fails.

    Use it in programs of one process, around steps that fail because of wrong input.
    `chainermn.agreement.exit_together` does the same on several ranks.

    Raises
    ------
    SystemExit
        If the block raises ImportError, OSError, RuntimeError or ValueError.

    Examples
    --------
    >>> with chainermn.files.exit_on_error():
    ...     chainermn.files.check_trained("result/best.npz", "apps/mnist/predict.py")
    Traceback (most recent call last):
    SystemExit: error: there is no trained network result/best.npz: train first, such as ...
    """
    try:
        yield
    except WRONG_INPUT as error:
        raise SystemExit(f"error: {error}") from None


def check_trained(
    weights: str | os.PathLike[str], script: str | os.PathLike[str], *beside: str
) -> None:
    """Check that a training has written the files that a program needs.

    Parameters
    ----------
    weights : path
        File with the weights of a network.
    script : path
        Program that needs it, in the folder of ``train.py``.
    *beside : str
        Names of other files that it needs, in the folder of ``weights``.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        If one of the files is missing, or a folder; the message says how to get it.

    Examples
    --------
    >>> chainermn.files.check_trained("result/best.npz", "apps/mnist/predict.py")
    Traceback (most recent call last):
    FileNotFoundError: there is no trained network result/best.npz: train first, such as ...
    """
    weights = Path(weights)
    if weights.is_dir():
        raise IsADirectoryError(f"{weights} is a folder: name a file in it, such as best.npz")
    missing = [it for it in map(weights.with_name, (weights.name, *beside)) if not it.exists()]
    if weights in missing:
        train = os.path.relpath(Path(script).with_name("train.py"))
        command = f"mpiexec -n 2 python {shlex.join((train, '--out', str(weights.parent)))}"
        raise FileNotFoundError(
            f"there is no trained network {weights}: train first, such as with `{command}`, or "
            "name the file of another"
        )
    if missing:
        raise FileNotFoundError(
            f"there is no {missing[0]}: train.py writes it beside the weights, keep both in one "
            "folder"
        )


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Write a file completely or not at all: it is replaced when the ``with`` block ends.

    If the block raises, or the process is killed, the old file does not change.

    Parameters
    ----------
    path : path
        File to write, in an existing folder.
    mode : {'w', 'wb'}
        Whether to write text, as UTF-8, or bytes.

    Raises
    ------
    OSError
        If the file cannot be written; the error has its name, even if the disk is full.

    Examples
    --------
    >>> if comm.rank == 0:
    ...     with chainermn.files.atomic_write("scores.json") as file:
    ...         n = file.write("[0.9, 0.8]")
    ...     print(chainermn.files.read_text("scores.json"))
    [0.9, 0.8]
    """
    path = Path(path)
    # Several processes may write the same file, and nobody must be able to put a link there.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open(
            mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8"
        ) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # There is no name if the disk is full.
        if error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    # Not every file system can sync a directory; the file itself is safe by now.
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular(
    path: str | os.PathLike[str], most: int | None = None, buffering: int = -1
) -> BinaryIO:
    """Open a file for reading bytes.

    Parameters
    ----------
    path : path
        File to open.
    most : int, optional
        Largest allowed size in bytes.
    buffering : int
        Buffering, as in Python's ``open``.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is a pipe or a device, which may never end, or if it is larger.

    Examples
    --------
    >>> chainermn.files.open_regular("/dev/zero")
    Traceback (most recent call last):
    ValueError: /dev/zero: expected a regular file, got a pipe or a device
    """

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a pipe would wait for a writer

    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(open(path, "rb", buffering, opener=open_at_once))
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: expected a regular file, got a pipe or a device")
        if most is not None and status.st_size > most:
            raise ValueError(f"{path}: expected at most {most} bytes, got {status.st_size}")
        on_error.pop_all()
        return file


@contextlib.contextmanager
def open_unpacked(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, and unpack it if it is gzipped, whatever its name.

    A browser may unpack a download and keep the ending ``.gz``. Limit what you read: a small file
    can unpack to gigabytes.

    Raises
    ------
    OSError, ValueError
        For the reasons of `open_regular`, or inside the ``with`` block if the file is damaged.

    Examples
    --------
    >>> with chainermn.files.atomic_write("words.gz", "wb") as file:
    ...     n = file.write(b"not packed")
    >>> with chainermn.files.open_unpacked("words.gz") as file:
    ...     file.read(3)
    b'not'
    """
    with open_regular(path) as file, as_unpacked(file, path) as content:
        yield content


@contextlib.contextmanager
def as_unpacked(file: BinaryIO, name: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Unpack an open file, if it is gzipped; see `open_unpacked`.

    Parameters
    ----------
    file : binary file
        Buffered file, such as ``sys.stdin.buffer``, of which nothing has been read.
    name : path
        Name of the file in errors.

    Raises
    ------
    ValueError
        Inside the ``with`` block, if the file is damaged.

    Examples
    --------
    >>> with chainermn.files.atomic_write("words.txt", "wb") as file:
    ...     n = file.write(b"not packed")
    >>> with open("words.txt", "rb") as file:
    ...     with chainermn.files.as_unpacked(file, "words.txt") as content:
    ...         content.read(3)
    b'not'
    """
    try:
        yield gzip.GzipFile(fileobj=file) if is_gzipped(file) else file  # type: ignore[misc]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}: damaged gzip file ({error})") from None


def is_gzipped(file: BinaryIO) -> bool:
    """Tell whether a buffered file, of which nothing has been read, begins like a gzipped one.

    Examples
    --------
    >>> with chainermn.files.atomic_write("words.gz", "wb") as file:
    ...     n = file.write(b"not packed")
    >>> with open("words.gz", "rb") as file:
    ...     chainermn.files.is_gzipped(file)
    False
    """
    return file.peek(len(GZIP)).startswith(GZIP)  # type: ignore[attr-defined]


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a file of at most ``most`` bytes; it raises like `open_regular`.

    Examples
    --------
    >>> with chainermn.files.atomic_write("weights", "wb") as file:
    ...     n = file.write(bytes(8))
    >>> chainermn.files.read_bytes("weights", most=4)
    Traceback (most recent call last):
    ValueError: weights: expected at most 4 bytes, got 8
    """
    with open_regular(path, most) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], most: int = 1 << 26) -> str:
    """Return the text of a UTF-8 file of at most ``most`` bytes.

    Raises
    ------
    OSError, ValueError
        For the reasons of `open_regular`, or if the file is not UTF-8.

    Examples
    --------
    >>> with chainermn.files.atomic_write("names.txt") as file:
    ...     n = file.write("cat dog")
    >>> chainermn.files.read_text("names.txt").split()
    ['cat', 'dog']
    """
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from None


def read_lines(
    lines: BinaryIO, name: str | os.PathLike[str], most: int = 1_000_000
) -> Iterator[bytes]:
    """Yield the lines of a binary file.

    Parameters
    ----------
    lines : binary file
        File to read, of any kind; it may be endless.
    name : path
        Name of the file in errors.
    most : int
        Largest size of a line in bytes, including its line break.

    Raises
    ------
    ValueError
        If a line is longer, before the rest of it is read.

    Examples
    --------
    >>> import io
    >>> list(chainermn.files.read_lines(io.BytesIO(b"a few words"), "text", most=5))
    Traceback (most recent call last):
    ValueError: text:1: expected a line of at most 5 bytes
    """
    pieces = iter(functools.partial(lines.readline, most + 1), b"")
    for number, line in enumerate(pieces, 1):
        if len(line) > most:
            raise ValueError(f"{name}:{number}: expected a line of at most {most} bytes")
        yield line


def open_tar(file: BinaryIO) -> tarfile.TarFile:
    """Open an uncompressed tar file for reading.

    Parameters
    ----------
    file : binary file
        File to read; it may be a pipe, if you read the members in sequence.

    Raises
    ------
    tarfile.TarError
        Here and while members are read, if a header is damaged. This includes members with a
        negative size, which some releases of Python read again and again, and large extended
        headers, for which Python before 3.11.10 and 3.12.6 needs quadratic time. Other errors
        are possible.

    Examples
    --------
    >>> import tarfile
    >>> if comm.rank == 0:
    ...     with tarfile.open("images.tar", "w") as tar:
    ...         tar.addfile(tarfile.TarInfo("cat.jpg"))
    ...     with chainermn.files.open_regular("images.tar") as file:
    ...         print(chainermn.files.open_tar(file).getnames())
    ['cat.jpg']
    """
    return _Archive(file)


class _Archive(tarfile.TarFile):
    """A tar file that is checked after each member, and read in limits until one is found."""

    def __init__(self, file: BinaryIO) -> None:
        self._source = _Source(file)
        super().__init__(fileobj=self._source)  # type: ignore[arg-type]  # nobody writes

    def next(self) -> tarfile.TarInfo | None:
        """Return the next member; None at the end."""
        self._source.left = _MOST_BYTES_OF_HEADERS
        member = super().next()
        self._source.left = sys.maxsize
        if len(self.pax_headers) > _MOST_FOR_ALL_MEMBERS:
            raise tarfile.ReadError(f"{len(self.pax_headers)} extended headers for all members")
        # For some damage, tarfile ends as if this were the end, which is a block of zeros.
        if any(self._source.last) if member is None else member.size < 0:
            raise tarfile.ReadError(f"damaged header before byte {self._source.tell()}")
        return member


class _Source:
    """A file of which only so many bytes may be read; it seeks in a pipe, too, but not back."""

    def __init__(self, file: BinaryIO) -> None:
        self.left = sys.maxsize
        self.last = b""  # what was read last
        self.close, self.seekable = file.close, file.seekable
        self._file = file
        self._position = file.tell() if file.seekable() else 0

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.left:
            limit = f"at most {_MOST_BYTES_OF_HEADERS} bytes of headers for a member"
            raise tarfile.ReadError(f"expected {limit}, got a header of {size} bytes")
        self.left -= size
        self.last = self._read(size)
        return self.last

    def seek(self, position: int) -> int:
        if self.seekable():
            self._position = self._file.seek(position)
        while self._position < position and self._read(min(position - self._position, 1 << 20)):
            pass
        return self._position

    def tell(self) -> int:
        return self._position

    def _read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._position += len(content)
        return content


def read_json(path: str | os.PathLike[str], form: object, most: int = 1 << 26) -> Any:
    """Return the content of a JSON file after checking its form.

    Parameters
    ----------
    path : path
        File to read.
    form : object
        Form of the content, see `check_form`.
    most : int
        Largest allowed size in bytes.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is not JSON, has another form, or contains NaN or Infinity.

    Examples
    --------
    >>> with chainermn.files.atomic_write("best.json") as file:
    ...     n = file.write('{"epoch": 3, "scores": [0.9, 0.8]}')
    >>> chainermn.files.read_json("best.json", {"epoch": int, "scores": [float]})
    {'epoch': 3, 'scores': [0.9, 0.8]}
    """
    return parse_json(read_bytes(path, most), path, form)


def parse_json(content: bytes, name: str | os.PathLike[str], form: object) -> Any:
    """Return the content of JSON after checking its form; see `read_json`.

    Examples
    --------
    >>> chainermn.files.parse_json(b"[1, 2]", "numbers", [int])
    [1, 2]
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        found = json.loads(content, parse_constant=refuse)
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name}: not JSON ({error})") from None
    check_form(found, form, str(name))
    return found


def check_form(value: Any, form: Any, name: str, *place: str | int) -> None:
    """Check the types in the content of a JSON file or the like.

    Parameters
    ----------
    value : object
        Value to check.
    form : object
        Expected form, which is one of: a type (``float`` means any finite number, and a ``bool``
        is not a number); a range of integers; a set of allowed values; a list with one form for
        all items; a tuple with a form for each item; a dict with the forms of keys (other keys
        are allowed, and the key ``str`` stands for all keys).
    name : str
        Name of the whole content in errors.
    *place : str or int
        Keys and indices that lead to the value.

    Raises
    ------
    ValueError
        If the value has another form.

    Examples
    --------
    >>> chainermn.files.check_form({"hosts": ["a", 2]}, {"hosts": [str]}, "job")
    Traceback (most recent call last):
    ValueError: job: 'hosts'[1]: expected a string, got 2
    """

    def check(is_right: bool, expected: str) -> None:
        if not is_right:
            raise ValueError(
                f"{_shown(name, place)}: expected {expected}, got {reprlib.repr(value)}"
            )

    if isinstance(form, dict):
        check(isinstance(value, dict), "an object")
        for key in value if str in form else form:
            if key not in value:
                raise ValueError(f"{_shown(name, place)}: {key!r} is missing")
            check_form(value[key], form[str if str in form else key], name, *place, key)
    elif isinstance(form, list):
        check(isinstance(value, list), "a list")
        for i, item in enumerate(value):
            check_form(item, form[0], name, *place, i)
    elif isinstance(form, tuple):
        check(isinstance(value, list) and len(value) == len(form), f"a list of {len(form)}")
        for i, item in enumerate(value):
            check_form(item, form[i], name, *place, i)
    elif isinstance(form, range):
        is_right = type(value) is int and value in form
        check(is_right, f"an integer from {form[0]} to {form[-1]}")
    elif isinstance(form, (set, frozenset)):
        is_right = isinstance(value, (str, int)) and value in form
        check(is_right, f"one of {', '.join(map(str, sorted(form)))}")
    elif form is float:
        is_right = type(value) in (int, float) and abs(value) <= sys.float_info.max
        check(is_right, "a finite number")
    elif form is not object:
        is_right = isinstance(value, form) and (form is bool or not isinstance(value, bool))
        check(is_right, _name_of(form))


def _shown(name: str, place: tuple[str | int, ...]) -> str:
    keys = (f"[{key}]" if isinstance(key, int) else f": {reprlib.repr(key)}" for key in place)
    return name + "".join(keys)


def _name_of(form: Any) -> str:
    if isinstance(form, UnionType):
        return " or ".join(map(_name_of, form.__args__))
    names = {str: "a string", int: "an integer", bool: "true or false", dict: "an object"}
    return names.get(form, "null")
