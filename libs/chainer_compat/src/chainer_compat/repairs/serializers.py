"""Make Chainer's serializers safe: they trust a file's claims and unpickle its contents."""

from __future__ import annotations

import copy
import math
from types import ModuleType
from typing import Any

from numpy.lib.npyio import NpzFile

from chainer_compat import npz, surgery

# Bytes that an array may claim without storing them, for example because they are zeros.
_MOST_UNWRITTEN = 2**20


def files_can_reach_others() -> bool:
    import h5py  # noqa: F401

    return True


def read_npz_safely(module: ModuleType) -> None:
    """Read NPZ files with `chainer_compat.npz`, even those that NumPy has opened."""
    deserializer = module.NpzDeserializer
    init, call = deserializer.__init__, deserializer.__call__

    @surgery.replaces(deserializer, "__init__")
    def __init__(self: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, NpzFile) and file.zip is not None:
            name = getattr(file.fid, "name", None) or file.zip.filename or "the file"
            file = npz.NpzArrays(file.zip, str(name))
        init(self, file, *args, **kwargs)

    @surgery.replaces(deserializer, "__call__")
    def __call__(self: Any, key: str, value: Any) -> Any:
        if isinstance(self.npz, npz.NpzArrays):
            self = copy.copy(self)
            self.npz = _ReadFor(self.npz, value)
        return call(self, key, value)

    @surgery.replaces(module, "load_npz")
    def load_npz(
        file: Any, obj: Any, path: str = "", strict: bool = True, ignore_names: Any = None
    ) -> None:
        with npz.open_npz(file) as arrays:
            deserializer(arrays, path, strict, ignore_names).load(obj)


class _ReadFor:
    """The arrays of a file, one of which will replace a value."""

    def __init__(self, arrays: npz.NpzArrays, value: Any) -> None:
        self._arrays, self._value = arrays, value

    def __contains__(self, key: str) -> bool:
        return key in self._arrays

    def __getitem__(self, key: str) -> Any:
        return self._arrays.read_for(key, self._value)


def read_hdf5_safely(module: ModuleType) -> None:
    """Read only data in the HDF5 file itself, and check its claimed size."""
    deserializer = module.HDF5Deserializer
    getitem, call = deserializer.__getitem__, deserializer.__call__

    @surgery.replaces(deserializer, "__getitem__")
    def __getitem__(self: Any, key: str) -> Any:
        if self.group is not None:
            _check_links(self.group, key.strip("/"))
        return getitem(self, key)

    @surgery.replaces(deserializer, "__call__")
    def __call__(self: Any, key: str, value: Any) -> Any:
        if self.group is not None:
            start = self.group.file if key.startswith("/") else self.group
            dataset = _check_links(start, key.strip("/"))
            if dataset is not None and getattr(dataset, "shape", ()) is not None:
                _check_dataset(dataset, value)
        return call(self, key, value)


def _check_links(group: Any, path: str) -> Any:
    """Return the object at a path without links; None if there is none."""
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
        raise npz.DamagedFileError(f"{place} is not an array")
    if dataset.is_virtual or dataset.external:
        npz.refuse(f"{place} has its data in other files")
        return
    is_text = h5py.check_string_dtype(dataset.dtype) is not None
    if dataset.dtype.hasobject and not (is_text and dataset.shape == ()):
        raise npz.DamagedFileError(
            f"{place} must hold numbers or a string, got {dataset.dtype} of shape {dataset.shape}"
        )
    if dataset.file.mode != "r":
        dataset.file.flush()  # otherwise recent data may not be stored yet
    size = math.prod(dataset.shape)
    needed = dataset.dtype.itemsize * max(size, math.prod(dataset.chunks or ()))
    stored = min(dataset.id.get_storage_size(), dataset.file.id.get_filesize())
    if (
        size
        and not dataset.dtype.hasobject
        and needed > max(npz.DEFLATE * stored, _MOST_UNWRITTEN)
    ):
        raise npz.DamagedFileError(f"{place} claims to have {needed} bytes, but has {stored}")
    if isinstance(value, (int, float, complex)) and size != 1:
        raise TypeError(
            f"{place}: an array of shape {dataset.shape} is not of type {type(value).__name__}"
        )


def _place(found: Any, name: str = "") -> str:
    return f"{f'{found.name}/{name}'.strip('/')!r} in {found.file.filename}"
