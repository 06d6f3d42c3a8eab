"""Chainer's serializers read whatever a file says, and unpickle what it holds."""

from __future__ import annotations

import copy
import functools
import math
from types import ModuleType
from typing import Any

from numpy.lib.npyio import NpzFile

from chainer_compat import npz

# Bytes of an array that may have been announced, but not written; they are zeros, say.
_MOST_UNWRITTEN = 2**20


def files_can_run_code() -> bool:
    return True


def files_can_reach_others() -> bool:
    import h5py  # noqa: F401

    return True


def read_npz_safely(module: ModuleType) -> None:
    """Read NPZ files by `chainer_compat.npz`, also those that NumPy has opened."""
    deserializer = module.NpzDeserializer
    init, call = deserializer.__init__, deserializer.__call__

    @functools.wraps(init)
    def __init__(self: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, NpzFile) and file.zip is not None:
            name = getattr(file.fid, "name", None) or file.zip.filename or "the file"
            file = npz.NpzArrays(file.zip, str(name))
        init(self, file, *args, **kwargs)

    @functools.wraps(call)
    def __call__(self: Any, key: str, value: Any) -> Any:
        if isinstance(self.npz, npz.NpzArrays):
            self = copy.copy(self)
            self.npz = _ReadFor(self.npz, value)
        return call(self, key, value)

    @functools.wraps(module.load_npz)
    def load_npz(
        file: Any, obj: Any, path: str = "", strict: bool = True, ignore_names: Any = None
    ) -> None:
        with npz.open_npz(file) as arrays:
            deserializer(arrays, path, strict, ignore_names).load(obj)

    deserializer.__init__, deserializer.__call__ = __init__, __call__
    module.load_npz = load_npz  # type: ignore[attr-defined]


class _ReadFor:
    """The arrays of a file, for one value that is to be replaced by one of them."""

    def __init__(self, arrays: npz.NpzArrays, value: Any) -> None:
        self._arrays, self._value = arrays, value

    def __contains__(self, key: str) -> bool:
        return key in self._arrays

    def __getitem__(self, key: str) -> Any:
        return self._arrays.read_for(key, self._value)


def read_hdf5_safely(module: ModuleType) -> None:
    """Read from an HDF5 file only what is in the file itself, and as large as it says."""
    deserializer = module.HDF5Deserializer
    getitem, call = deserializer.__getitem__, deserializer.__call__

    @functools.wraps(getitem)
    def __getitem__(self: Any, key: str) -> Any:
        if self.group is not None:
            _check_links(self.group, key.strip("/"))
        return getitem(self, key)

    @functools.wraps(call)
    def __call__(self: Any, key: str, value: Any) -> Any:
        if self.group is not None:
            start = self.group.file if key.startswith("/") else self.group
            dataset = _check_links(start, key.strip("/"))
            if dataset is not None and getattr(dataset, "shape", ()) is not None:
                _check_dataset(dataset, value)
        return call(self, key, value)

    deserializer.__getitem__, deserializer.__call__ = __getitem__, __call__


def _check_links(group: Any, path: str) -> Any:
    """Return what a path leads to without links; None if there is nothing."""
    import h5py

    found = group
    for name in path.split("/"):
        if name in ("", "."):
            continue
        link = found.get(name, getlink=True) if isinstance(found, h5py.Group) else None
        if link is None:
            return None
        if not isinstance(link, h5py.HardLink):
            target = f"{link.path} in {getattr(link, 'filename', 'the same file')}"
            npz.refuse(f"{_place(found, name)} is a link to {target}")
        found = found[name]
    return found


def _check_dataset(dataset: Any, value: Any) -> None:
    import h5py

    place = _place(dataset)
    if not isinstance(dataset, h5py.Dataset):
        raise npz.DamagedFileError(f"{place} is no array")
    if dataset.is_virtual or dataset.external:
        npz.refuse(f"{place} has its data in other files")
        return
    is_text = h5py.check_string_dtype(dataset.dtype) is not None
    if dataset.dtype.hasobject and not (is_text and dataset.shape == ()):
        raise npz.DamagedFileError(
            f"{place} has neither numbers nor a text, but {dataset.dtype} of shape {dataset.shape}"
        )
    if dataset.file.mode != "r":
        dataset.file.flush()  # or what has just been written is not there yet
    size = math.prod(dataset.shape)
    needed = dataset.dtype.itemsize * max(size, math.prod(dataset.chunks or ()))
    stored = min(dataset.id.get_storage_size(), dataset.file.id.get_filesize())
    if (
        size
        and not dataset.dtype.hasobject
        and needed > max(npz.DEFLATE * stored, _MOST_UNWRITTEN)
    ):
        raise npz.DamagedFileError(f"{place} promises {needed} bytes, of which {stored} are there")
    if isinstance(value, (int, float, complex)) and size != 1:
        raise TypeError(f"{place}: an array of {dataset.shape} is no {type(value).__name__}")


def _place(found: Any, name: str = "") -> str:
    return f"{f'{found.name}/{name}'.strip('/')!r} in {found.file.filename}"
