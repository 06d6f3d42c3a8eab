"""Files: written completely or not at all, and read as if a stranger had made them.

What reads takes no more memory than its caller says, never waits for a pipe, and names the file,
and the line or the key, in its errors.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import reprlib
import secrets
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import IO, Any, BinaryIO, Literal, NoReturn

# No extended header of a tar file has more bytes, as no path has. There may be as many of them as
# there are members, except of those that are for all members.
_LARGEST_TAR_HEADER = 1 << 12
_MOST_FOR_ALL_MEMBERS = 100
_EXTENDED = {b"x", b"g", b"X", b"L", b"K"}


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file that takes the place of another one when the ``with`` block has ended.

    If the block raises, or the process is killed, what was there before stays as it was.

    Parameters
    ----------
    path : path
        Its folder must exist.
    mode : {'w', 'wb'}
        Text is written as UTF-8.

    Raises
    ------
    OSError
        With the name of the file, also if the disk is full.
    """
    path = Path(path)
    # Several may write the same file. Nobody else may have put a link there before.
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
        if error.errno and error.filename is None:  # that of a disk without space
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
    most : int, optional
        Bytes that the file may have.
    buffering : int
        As for Python's `open`.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is a pipe or a device, which may never end, or has more bytes.
    """

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a pipe would wait for who writes into it

    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(open(path, "rb", buffering, opener=open_at_once))
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: expected a regular file, got a pipe or a device")
        if most is not None and status.st_size > most:
            raise ValueError(f"{path}: expected at most {most} bytes, got {status.st_size}")
        on_error.pop_all()
        return file


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a file of at most so many bytes. Raises what `open_regular` does."""
    with open_regular(path, most) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], most: int = 1 << 26) -> str:
    """Return the text of a file of at most so many bytes of UTF-8.

    Raises
    ------
    OSError, ValueError
        As `open_regular` does; or if it is no UTF-8.
    """
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 ({error})") from None


def read_lines(
    lines: BinaryIO, name: str | os.PathLike[str], most: int = 1_000_000
) -> Iterator[bytes]:
    """Yield the lines of a binary file.

    Parameters
    ----------
    lines : binary file
        Need not be regular, nor have an end.
    name : path
        What to call it in errors.
    most : int
        Bytes that a line may have, with its line break.

    Raises
    ------
    ValueError
        If a line has more; before more is read.
    """
    pieces = iter(functools.partial(lines.readline, most + 1), b"")
    for number, line in enumerate(pieces, 1):
        if len(line) > most:
            raise ValueError(f"{name}:{number}: expected a line of at most {most} bytes")
        yield line


def open_tar(file: BinaryIO, mode: Literal["r:", "r|"] = "r:") -> tarfile.TarFile:
    """Open a tar file, which is not compressed, for reading.

    Parameters
    ----------
    file : binary file
    mode : {'r:', 'r|'}
        The latter is for a file that cannot seek.

    Raises
    ------
    tarfile.TarError
        Here and where members are read, also if the size of one is negative, which would lead
        back to the same one for ever, or it has a large extended header, for which Python before
        3.11.10 and 3.12.6 takes the square of its size in time. Others are raised as well.
    """
    return tarfile.open(fileobj=file, mode=mode, tarinfo=_Member)


class _Member(tarfile.TarInfo):
    """A member of a tar file, which is checked before tarfile goes on after it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """Read a header as it stands in the file."""
        member = super().frombuf(buf, encoding, errors)
        if member.type in _EXTENDED and member.size > _LARGEST_TAR_HEADER:
            raise tarfile.ReadError(f"an extended header of {member.size} bytes")
        return member._checked()

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        """Read a header with the extended ones before it, which can say another size."""
        member = super().fromtarfile(archive)
        if len(archive.pax_headers) > _MOST_FOR_ALL_MEMBERS:
            raise tarfile.ReadError(f"{len(archive.pax_headers)} extended headers for all members")
        return member._checked()

    def _checked(self) -> _Member:
        if self.size < 0:
            raise tarfile.ReadError(f"{self.name!r:.100} has a size of {self.size} bytes")
        return self


def read_json(path: str | os.PathLike[str], form: object, most: int = 1 << 26) -> Any:
    """Return the content of a JSON file, of at most so many bytes, once it has the right form.

    Parameters
    ----------
    path : path
    form : object
        See `check_form`.
    most : int

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is something else, has another form, or NaN or Infinity for a number.
    """
    return parse_json(read_bytes(path, most), path, form)


def parse_json(content: bytes, name: str | os.PathLike[str], form: object) -> Any:
    """Return what JSON says, once it has the right form; see `read_json`."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        found = json.loads(content, parse_constant=refuse)
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name}: no JSON ({error})") from None
    check_form(found, form, str(name))
    return found


def check_form(value: Any, form: Any, name: str, *place: str | int) -> None:
    """Check the types of what JSON or the like has said.

    Parameters
    ----------
    value : object
    form : object
        A type; ``float`` is any finite number, and no number is a ``bool``. A range of integers.
        A set of the values to choose from. A list with the form of all items, a tuple with that
        of each. A dict with the forms of keys, beside which there may be others; the key ``str``
        stands for all keys.
    name : str
        What to call the whole in errors.
    *place : str or int
        Keys and indices that led to the value.

    Raises
    ------
    ValueError
    """

    def check(is_right: bool, expected: str) -> None:
        if not is_right:
            raise ValueError(f"{_shown(name, place)}: expected {expected}, got {_short(value)}")

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
    return name + "".join(f"[{p}]" if isinstance(p, int) else f": {_short(p)}" for p in place)


def _name_of(form: Any) -> str:
    if isinstance(form, UnionType):
        return " or ".join(map(_name_of, form.__args__))
    names = {str: "a string", int: "an integer", bool: "true or false", dict: "an object"}
    return names.get(form, "null")


def _short(value: object) -> str:
    """Return a value as one short line, whatever it is."""
    return reprlib.repr(value)
