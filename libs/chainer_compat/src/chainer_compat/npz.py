"""Read NPZ files of unknown origin safely.

`numpy.load` allocates as much memory as a header claims. With ``allow_pickle=True``, which Chainer
needs for None, it also runs code from the file. This module checks what a file claims before it
reads it, and never runs code.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy
from numpy.lib import format as npy
from numpy.typing import NDArray

from chainer_compat import pickles, settings
from chainer_compat.pickles import NotPlainError

_CHUNK = 2**20
_LONGEST_HEADER = 2**14  # NumPy itself accepts 10,000 characters
_LARGEST_PICKLE = 2**20
DEFLATE = 1032  # largest ratio of its output to its input


class DamagedFileError(OSError, zipfile.BadZipFile):
    """Raised if a file does not have its format or contradicts itself."""


class UnsafeFileError(OSError):
    """Raised if a file could run a program or reach another file."""


class ShapeError(ValueError):
    """Raised if an array does not have the shape of what it would replace.

    Attributes
    ----------
    file, key : str
        Name of the file, and key of the array.
    saved, expected : tuple of int
        Shape of the array, and of what it would replace.
    """

    def __init__(
        self,
        message: str,
        file: str = "",
        key: str = "",
        saved: tuple[int, ...] = (),
        expected: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)  # alone, so that copies and pickles work
        self.file, self.key, self.saved, self.expected = file, key, saved, expected


@contextlib.contextmanager
def open_npz(
    file: str | os.PathLike[str] | IO[bytes], name: str | None = None
) -> Iterator[NpzArrays]:
    """Open an NPZ file for reading.

    Parameters
    ----------
    file : path or file
        Path, or an open file, which must be seekable.
    name : str, optional
        Name of the file in errors, by default its path or own name.

    Yields
    ------
    NpzArrays
        The arrays of the file.

    Raises
    ------
    DamagedFileError, UnsafeFileError, OSError
        If the file is damaged, is not safe, or cannot be read.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(file, "read"):
            opened: Any = file
        else:
            opened = stack.enter_context(open(file, "rb"))
        name = name or getattr(opened, "name", None) or "the file"
        with explained(str(name)):
            _check_kind(opened, str(name))
            archive = stack.enter_context(zipfile.ZipFile(opened))
        yield NpzArrays(archive, str(name))


class NpzArrays(Mapping[str, NDArray[Any]]):
    """The arrays of an open NPZ file, each read on access.

    An array of objects may hold None, numbers and strings. ``CHAINER_COMPAT_TRUST_FILES=1`` also
    unpickles other objects.

    Parameters
    ----------
    archive : zipfile.ZipFile
        The open file.
    name : str
        Name of the file in errors.

    Raises
    ------
    DamagedFileError
        If the file is damaged. All methods may raise this.
    UnsafeFileError
        If an array is not safe. Only methods that read raise this.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str) -> None:
        self._archive = archive
        self._name = name
        with explained(name):
            self._members = list_members(archive)
        self._headers: dict[str, _Header] = {}
        self._replaced: dict[str, NDArray[Any]] = {}

    @property
    def files(self) -> list[str]:
        """Keys, under the name that NumPy's NpzFile uses."""
        return list(self._members)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: object) -> bool:
        return key in self._members or key in self._replaced

    def __getitem__(self, key: str) -> NDArray[Any]:
        if key in self._replaced:
            return self._replaced[key]
        return self._read(key, self.header(key))

    def replace(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Return these arrays instead of those in the file from now on."""
        self._replaced.update(arrays)

    def header(self, key: str) -> _Header:
        """Return a member's header, after checking that it is possible."""
        if key not in self._members:
            raise KeyError(f"{key} is not a file in the archive")
        if key not in self._headers:
            with self._open(key) as stream:
                self._headers[key] = _read_header(stream, self._members[key].file_size)
        return self._headers[key]

    def read_for(self, key: str, value: Any) -> NDArray[Any]:
        """Read an array that will replace a value, after checking that it fits.

        Raises
        ------
        TypeError, ShapeError
            If something larger would replace a number or an array, as in Chainer.
        """
        if key in self._replaced:
            return self._replaced[key]
        shape, dtype, *_ = header = self.header(key)
        if not dtype.hasobject:
            self._check_fits(key, value, shape, dtype)
        return self._read(key, header)

    def verify(self) -> None:
        """Read everything without keeping it, and raise if an array is damaged or unsafe."""
        for key in self:
            header = self.header(key)
            if header.dtype.hasobject:
                self._read(key, header)
                continue
            with self._open(key) as stream:
                while stream.read(_CHUNK):
                    pass

    def _read(self, key: str, header: _Header) -> NDArray[Any]:
        try:
            with self._open(key) as stream:
                read_exactly(stream, header.offset)
                if header.dtype.hasobject:
                    return _read_objects(stream, header.size)
                order: Any = "F" if header.fortran_order else "C"
                array: NDArray[Any] = numpy.empty(header.shape, header.dtype, order)
                _fill(array, stream)
                return array
        except NotPlainError as error:
            refuse(
                f"{self._place(key)} is a pickle of more than None, numbers and strings: it has "
                f"{error}. Loading it could run any program"
            )
        with self._archive.open(self._members[key]) as stream:
            stream.read(header.offset)
            return pickle.load(stream)  # noqa: S301  # its maker is trusted

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[IO[bytes]]:
        with explained(self._place(key)), self._archive.open(self._members[key]) as stream:
            yield stream

    def _check_fits(
        self, key: str, value: Any, shape: tuple[int, ...], dtype: numpy.dtype[Any]
    ) -> None:
        place = self._place(key)
        if hasattr(value, "shape") and not isinstance(value, numpy.generic):
            if not _can_broadcast(shape, value.shape):
                message = f"{place}: could not broadcast shape {shape} to {value.shape}"
                raise ShapeError(message, self._name, key, shape, value.shape)
            if dtype.itemsize > 32 and not numpy.can_cast(dtype, value.dtype, "same_kind"):
                raise TypeError(f"{place}: cannot cast from {dtype} to {value.dtype}")
        elif isinstance(value, (int, float, complex)) and math.prod(shape) != 1:
            raise TypeError(
                f"{place}: an array of shape {shape} is not of type {type(value).__name__}"
            )

    def _place(self, key: str) -> str:
        return f"{key!r} in {self._name}"


def refuse(fault: str) -> None:
    """Raise UnsafeFileError, or only warn if the user trusts all files."""
    if not settings.trusts_files():
        raise UnsafeFileError(
            f"{fault}. If you trust whoever made the file, {settings.TRUST_FILES}=1 reads it"
        )
    warnings.warn(f"{fault}. Reading it, because {settings.TRUST_FILES} is set", stacklevel=2)


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]
    fortran_order: bool
    offset: int  # of the data, in bytes
    size: int


@contextlib.contextmanager
def explained(place: str) -> Iterator[None]:
    """Turn all exceptions of zipfile, zlib and NumPy about damaged files into one type."""
    try:
        yield
    except (DamagedFileError, NotPlainError):
        raise
    except Exception as error:
        # If a damaged file leads to an impossible position, the system reports EINVAL.
        is_of_the_system = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if is_of_the_system:
            raise
        reason = str(error) or type(error).__name__
        raise DamagedFileError(f"{place} is damaged: {reason}") from error


def _check_kind(file: IO[bytes], name: str) -> None:
    start = file.read(4)
    file.seek(-len(start), os.SEEK_CUR)
    if start not in (b"PK\3\4", b"PK\5\6"):
        is_pickle = start[:1] == b"\x80" and start[1:2] <= b"\5"
        raise DamagedFileError(
            f"{name} is not an NPZ file"
            + (", but a pickle, which can run any program" * is_pickle)
        )


def list_members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive by array name, after checking their sizes."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.is_dir():  # NumPy never writes folders, but archives of folders have them
            continue
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"{name!r} occurs twice")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name!r} is compressed in a way that NumPy never uses")
        stored = info.compress_type == zipfile.ZIP_STORED
        most = info.compress_size * (1 if stored else DEFLATE)
        if info.file_size > most:
            raise ValueError(
                f"{name!r} claims to have {info.file_size} bytes, but has at most {most}"
            )
        members[name] = info
    assert archive.fp is not None
    length = archive.fp.seek(0, os.SEEK_END)
    if sum(info.compress_size for info in members.values()) > length:
        raise ValueError("its members overlap")  # a few bytes would unpack to many
    return members


def _read_header(stream: IO[bytes], length: int) -> _Header:
    start = io.BytesIO(stream.read(_LONGEST_HEADER))
    version = npy.read_magic(start)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its version is {version}")
    # Version 3 only differs in the characters allowed in field names.
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran_order, dtype = read(start)
    size = length - start.tell()
    expected = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or (dtype.itemsize == 0 and math.prod(shape) > 1):
        raise ValueError(f"its shape cannot be {shape}")
    if not dtype.hasobject and size != expected:
        raise ValueError(
            f"an array of {dtype} of shape {shape} has {expected} bytes, but this has {size}"
        )
    return _Header(shape, dtype, fortran_order, start.tell(), size)


def _can_broadcast(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Tell whether `numpy.copyto` copies one shape to the other."""
    while shape[:1] == (1,) and len(shape) > len(target):
        shape = shape[1:]
    try:
        return numpy.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _fill(array: NDArray[Any], stream: IO[bytes]) -> None:
    if array.nbytes == 0:
        return
    content = array.ravel(order="K").view(numpy.uint8)
    for start in range(0, len(content), _CHUNK):
        part = content[start : start + _CHUNK]
        part[:] = numpy.frombuffer(read_exactly(stream, len(part)), numpy.uint8)


def _read_objects(stream: IO[bytes], size: int) -> NDArray[Any]:
    if size > _LARGEST_PICKLE:
        raise NotPlainError(f"{size} bytes, but at most {_LARGEST_PICKLE} are examined")
    array = pickles.array(pickles.read(read_exactly(stream, size)))
    if array.dtype != object:
        raise NotPlainError(f"an array of {array.dtype}")
    return array


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    """Return so many bytes; raise EOFError if there are fewer."""
    content = stream.read(size)
    if len(content) < size:
        raise EOFError("it ends too early")
    return content
