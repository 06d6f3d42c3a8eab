"""Read the weights that PyTorch has saved, without PyTorch and without running their code.

A ``.pth`` file is a pickle that names storages, which are kept beside it: since PyTorch 1.6 as
members of a zip archive, before as blocks after the pickle. ``.safetensors`` has no pickle.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple, NoReturn

import numpy
from numpy.typing import NDArray

from chainer_compat import pickles
from chainer_compat.npz import (
    DamagedFileError,
    UnsafeFileError,
    explained,
    list_members,
    read_exactly,
)
from chainer_compat.pickles import ORDERED, Call, Name, NotPlainError, Outside

_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # pickled number at the start
_TAR = b"ustar"  # at byte 257: PyTorch before 0.1.10
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors
_LARGEST_PICKLE = 2**26  # bytes; a large network's are fewer than a million
_DTYPES = {
    f"torch.{name}Storage": numpy.dtype(kind)
    for name, kind in {
        **{"Half": "<f2", "Float": "<f4", "Double": "<f8"},
        **{"Char": "i1", "Short": "<i2", "Int": "<i4", "Long": "<i8", "Byte": "u1", "Bool": "?"},
    }.items()
}
_SAFETENSORS_DTYPES = {"F16", "F32", "F64", "BOOL"} | {
    f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64)
}
_REBUILD = [Name(f"torch._utils._rebuild_{what}") for what in ("parameter", "tensor", "tensor_v2")]
_KINDS = "float16, float32, float64, integers or bool"


class Tensors(Mapping[str, NDArray[Any]]):
    """The tensors of an open file, each read on access.

    Attributes
    ----------
    shapes : dict of tuple of int
        Their shapes, by their names, in the order of the file.
    metadata : dict of str
        Notes of a ``.safetensors`` file.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        metadata: dict[str, str],
        read: Callable[[str], NDArray[Any]],
    ) -> None:
        self.shapes, self.metadata, self._read = shapes, metadata, read

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name)


def is_tensors(path: str | os.PathLike[str]) -> bool:
    """Tell by its content whether a file is PyTorch's: ``.pth`` of any age, or ``.safetensors``.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    with open(path, "rb") as file:
        return _kind(file) is not None


@contextlib.contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[Tensors]:
    """Open a file of tensors for reading.

    It must be a state dict: a dictionary, ordered or not, of names and tensors.

    Parameters
    ----------
    path : path

    Yields
    ------
    Tensors

    Raises
    ------
    DamagedFileError
        If the file contradicts itself, ends too early, or has a wrong checksum.
    UnsafeFileError
        If it is a pickle of anything else.
    ValueError
        If it is not a state dict, or of a kind or dtype that is not read here. The message says
        how to convert it.
    ImportError
        If it takes the package safetensors, which is not installed.
    OSError
        If the file cannot be read.
    """
    name = os.fspath(path)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        opened = _kind(file)
        if opened is None:
            raise DamagedFileError(
                f"{name} is not a file of PyTorch: neither .pth nor .safetensors"
            )
        file.seek(0)
        yield stack.enter_context(opened(file, name))


def _kind(
    file: IO[bytes],
) -> Callable[[IO[bytes], str], contextlib.AbstractContextManager[Tensors]] | None:
    start = file.read(512)
    if start.startswith(b"PK\3\4"):
        with contextlib.suppress(Exception), zipfile.ZipFile(file) as archive:
            if any(name.endswith("/data.pkl") for name in archive.namelist()):
                return _open_archive
        return None
    if start.startswith(_MAGIC):
        return _open_legacy
    if start[257:262] == _TAR:
        return _open_tar
    if start[8:9] == b"{" and struct.unpack("<Q", start[:8])[0] <= _LONGEST_HEADER:
        return _open_safetensors
    return None


@contextlib.contextmanager
def _open_safetensors(file: IO[bytes], name: str) -> Iterator[Tensors]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"{name}: {error}: pip install safetensors") from None
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(safe_open(name, "np"))
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise DamagedFileError(f"{name} is damaged: {error}") from None
        for key, part in slices.items():
            if part.get_dtype() not in _SAFETENSORS_DTYPES:
                raise _other_dtype(name, key, part.get_dtype())
        shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
        yield Tensors(shapes, dict(opened.metadata() or {}), opened.get_tensor)


def _open_tar(file: IO[bytes], name: str) -> NoReturn:
    raise ValueError(
        f"{name} is from before PyTorch 0.1.10: if you trust whoever made it, "
        + _convert(name, safe=False)
    )


class _Storage(NamedTuple):
    dtype: numpy.dtype[Any]
    key: str
    n: int  # of its numbers


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # in numbers, as the strides
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, content: bytes) -> NDArray[Any]:
        """Return the tensor, given the bytes of its storage."""
        dtype = self.storage.dtype
        numbers = numpy.frombuffer(content, dtype)
        strides = [stride * dtype.itemsize for stride in self.strides]
        view = numpy.lib.stride_tricks.as_strided(
            numbers[self.offset :], self.shape, strides, writeable=False
        )
        return numpy.array(view, order="C")


@contextlib.contextmanager
def _open_archive(file: IO[bytes], name: str) -> Iterator[Tensors]:
    with contextlib.ExitStack() as stack:
        with explained(name):
            archive = stack.enter_context(zipfile.ZipFile(file))
            members = list_members(archive)
            (index,) = (member for member in members if member.endswith("/data.pkl"))
            folder = index.removesuffix("data.pkl")
        if f"{folder}constants.pkl" in members:
            raise ValueError(
                f"{name} is a program of TorchScript, expected a state dict: with PyTorch, write "
                "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth')"
            )

        def content(member: str) -> bytes:
            with explained(f"{member!r} in {name}"):
                return archive.read(members[member])

        order = f"{folder}byteorder"
        if order in members and content(order) != b"little":
            raise ValueError(f"{name} was written on a big-endian machine: {_convert(name)}")
        if members[index].file_size > _LARGEST_PICKLE:
            raise DamagedFileError(f"{name}: its index is larger than {_LARGEST_PICKLE} bytes")
        with _safe(name):
            with explained(name):
                found = pickles.read(content(index))
            tensors = _state_dict(found, name)
        for key, (storage, *_) in tensors.items():
            member = f"{folder}data/{storage.key}"
            saved = members[member].file_size if member in members else 0
            if saved != storage.n * storage.dtype.itemsize:
                raise DamagedFileError(f"{name}: the storage of {key!r} has {saved} bytes")

        def read(key: str) -> NDArray[Any]:
            tensor = tensors[key]
            return tensor.of(content(f"{folder}data/{tensor.storage.key}"))

        yield Tensors({key: tensor.shape for key, tensor in tensors.items()}, {}, read)


@contextlib.contextmanager
def _open_legacy(file: IO[bytes], name: str) -> Iterator[Tensors]:
    with _safe(name):
        with explained(name):
            file.seek(len(_MAGIC))
            pickles.read(file)  # the version of the format, which has always been the same
            machine, found, keys = (pickles.read(file) for _ in range(3))
        if not pickles.mapping(machine).get("little_endian"):
            raise ValueError(f"{name} was written on a big-endian machine: {_convert(name)}")
        tensors = _state_dict(found, name)
    storages = {tensor.storage.key: tensor.storage for tensor in tensors.values()}
    places, end = {}, os.fstat(file.fileno()).st_size
    with explained(name):
        for key in keys:
            (n,) = struct.unpack("<q", read_exactly(file, 8))
            places[key, n] = file.tell()
            if file.seek(n * storages[key].dtype.itemsize, os.SEEK_CUR) > end:
                raise EOFError("it ends too early")
    for key, (storage, *_) in tensors.items():
        if (storage.key, storage.n) not in places or storages[storage.key] != storage:
            raise DamagedFileError(f"{name} is damaged: the storage of {key!r} is another")

    def read(key: str) -> NDArray[Any]:
        tensor = tensors[key]
        storage = tensor.storage
        file.seek(places[storage.key, storage.n])
        with explained(name):
            return tensor.of(read_exactly(file, storage.n * storage.dtype.itemsize))

    yield Tensors({key: tensor.shape for key, tensor in tensors.items()}, {}, read)


def _state_dict(found: object, name: str) -> dict[str, _Tensor]:
    items = pickles.mapping(found)
    for key, value in items.items():
        if not isinstance(key, str):
            raise NotPlainError(f"a name that is {pickles.described(key)}")
        if isinstance(value, Call) and value.function not in (ORDERED, *_REBUILD):
            raise NotPlainError(pickles.described(value))
    others = [key for key, value in items.items() if not isinstance(value, Call) or value.items]
    if others:
        inner = [key for key in others if "state_dict" in key or key == "model"]
        expression = f"found[{inner[0]!r}]" if inner else "found[...]"
        raise ValueError(
            f"{name}: expected a state dict, all of whose values are tensors, got one whose value "
            f"{others[0]!r} is {pickles.described(items[others[0]])}: {_convert(name, expression)}"
        )
    return {key: _tensor(value, key, name) for key, value in items.items()}


def _tensor(value: Call, key: str, name: str) -> _Tensor:
    if value.function == _REBUILD[0]:  # what it rebuilds a parameter of
        value, *_ = (*value.arguments, None)
    match value:
        case Call(
            Name("torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2"),
            (
                Outside(("storage", Name(kind), str(where), _, int(n), *view)),
                int(offset),
                tuple(shape),
                tuple(strides),
                *_,
            ),
        ) if view in ([], [None]):
            pass
        case _:
            raise NotPlainError(pickles.described(value))
    if kind not in _DTYPES:
        raise _other_dtype(name, key, kind.removeprefix("torch.").removesuffix("Storage"))
    # Strides may repeat numbers: a tensor could be far larger than its file.
    is_possible = len(shape) == len(strides) <= 64 and all(
        isinstance(number, int) and 0 <= number < 2**40 for number in (offset, n, *shape, *strides)
    )
    size = math.prod(shape) if is_possible else 0
    steps = ((length - 1) * stride for length, stride in zip(shape, strides, strict=False))
    if not is_possible or size > n or (size and offset + sum(steps) >= n):
        raise DamagedFileError(f"{name} is damaged: {key!r} is larger than its storage")
    return _Tensor(_Storage(_DTYPES[kind], where, n), offset if size else 0, shape, strides)


@contextlib.contextmanager
def _safe(name: str) -> Iterator[None]:
    try:
        yield
    except NotPlainError as error:
        raise UnsafeFileError(
            f"{name} is a pickle of more than tensors and ordered dictionaries: it has {error}. "
            "Loading it could run any program. If you trust whoever made it, load it with "
            "PyTorch, and write torch.save(model.state_dict(), 'weights.pth')"
        ) from None


def _other_dtype(name: str, key: str, got: str) -> ValueError:
    change = "{key: value.float() for key, value in found.items()}"
    return ValueError(
        f"{name}: expected tensors of {_KINDS}, got {got} in {key!r}: {_convert(name, change)}"
    )


def _convert(name: str, expression: str = "found", safe: bool = True) -> str:
    """Return advice: the command that makes PyTorch write a file again."""
    stem, ending = os.path.splitext(name)
    program = (
        "import sys, torch; "
        f"found = torch.load(sys.argv[1], map_location='cpu', weights_only={safe}); "
        f"torch.save({expression}, sys.argv[2])"
    )
    if ending == ".safetensors":
        program = (
            "import sys; from safetensors.torch import load_file, save_file; "
            f"found = load_file(sys.argv[1]); save_file({expression}, sys.argv[2])"
        )
    files = shlex.join([name, f"{stem}.new{ending}"])
    return f'where PyTorch is installed, run python -c "{program}" {files}'
