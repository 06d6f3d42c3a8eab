"""How arrays lie in memory: oneDNN's memory descriptors."""

from __future__ import annotations

import functools
import math
import weakref
from ctypes import addressof, c_int, c_int64, c_void_p
from typing import ClassVar

import numpy

from chainer_compat.onednn import library
from chainer_compat.onednn.library import Dims, Handle

_ANY = 1
FLOAT32 = numpy.dtype(numpy.float32)
_DATA_TYPES = {FLOAT32: 3, numpy.dtype(numpy.int32): 4, numpy.dtype("u1"): 6}
_DTYPES = {number: dtype for dtype, number in _DATA_TYPES.items()}
_NDIMS, _DIMS, _DATA_TYPE, _PADDED_DIMS = 256, 257, 258, 260
_INNER_NBLKS, _INNER_BLKS, _INNER_IDXS, _STRIDES = 263, 264, 265, 14


class Layout:
    """The shape, the dtype, and the order in memory of an array. Equal layouts are one object.

    Attributes
    ----------
    handle
        oneDNN's memory descriptor.
    shape : tuple of int
        What NumPy calls the shape.
    dtype : numpy.dtype
        float32, or int32 or uint8 for the indices of a pooling.
    size : int
        Number of elements in memory. More than the shape has if channels are padded.
    block : int
        Number of channels that lie beside each other in layouts such as ``nChw16c``; 0 in others.
    is_plain : bool
        Whether this is the order of a C-contiguous NumPy array.
    """

    _known: ClassVar[weakref.WeakValueDictionary[object, Layout]] = weakref.WeakValueDictionary()

    def __init__(self, handle: Handle, key: tuple[object, ...]) -> None:
        self.handle = handle
        shape, dtype, strides, block_sizes, block_axes, _ = key
        assert isinstance(shape, tuple) and isinstance(dtype, numpy.dtype)
        self.shape, self.dtype = shape, dtype
        self.size = library.load().dnnl_memory_desc_get_size(handle) // dtype.itemsize
        self.is_plain = not block_sizes and strides == _plain_strides(shape)
        self.block = 0
        if len(shape) == 4 and block_axes == (1,) and isinstance(block_sizes, tuple):
            (block,) = block_sizes
            _, c, h, w = shape
            groups = -(-c // block)
            if strides == (groups * h * w * block, h * w * block, w * block, block):
                self.block = block

    @classmethod
    def of(cls, descriptor: int | Handle) -> Layout:
        """Return the layout of a memory descriptor, which is copied."""
        key = _key(descriptor)
        found = cls._known.get(key)
        if found is None:
            found = cls._known.setdefault(key, cls(_descriptor("clone", descriptor), key))
        return found

    def blocks(self, buffer: numpy.ndarray) -> numpy.ndarray:
        """View memory of a layout with blocks as (batch, groups of channels, h, w, channels)."""
        n, c, h, w = self.shape
        return buffer.reshape(n, -(-c // self.block), h, w, self.block)


@functools.lru_cache(maxsize=4096)
def plain(shape: tuple[int, ...], dtype: numpy.dtype = FLOAT32) -> Layout:
    """Return the layout of a C-contiguous array."""
    strides = Dims(*_plain_strides(shape))
    kind = _DATA_TYPES[dtype]
    return Layout.of(_descriptor("create_with_strides", len(shape), Dims(*shape), kind, strides))


@functools.lru_cache(maxsize=4096)
def any_layout(shape: tuple[int, ...]) -> Handle:
    """Return a memory descriptor of float32 that leaves the order in memory to a primitive."""
    kind = _DATA_TYPES[FLOAT32]
    return _descriptor("create_with_tag", len(shape), Dims(*shape), kind, _ANY)


def _descriptor(create: str, *arguments: object) -> Handle:
    return Handle(f"dnnl_memory_desc_{create}", "dnnl_memory_desc_destroy", *arguments)


def _plain_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _key(descriptor: int | Handle) -> tuple[object, ...]:
    ndim = _number(descriptor, _NDIMS)
    blocks = _number(descriptor, _INNER_NBLKS)
    return (
        _numbers(descriptor, _DIMS, ndim),
        _DTYPES[_number(descriptor, _DATA_TYPE)],
        _numbers(descriptor, _STRIDES, ndim),
        _numbers(descriptor, _INNER_BLKS, blocks),
        _numbers(descriptor, _INNER_IDXS, blocks),
        _numbers(descriptor, _PADDED_DIMS, ndim),
    )


def _number(descriptor: int | Handle, query: int) -> int:
    found = c_int()
    library.load().dnnl_memory_desc_query(descriptor, query, addressof(found))
    return found.value


def _numbers(descriptor: int | Handle, query: int, count: int) -> tuple[int, ...]:
    if count == 0:
        return ()
    found = c_void_p()
    library.load().dnnl_memory_desc_query(descriptor, query, addressof(found))
    assert found.value is not None
    return tuple((c_int64 * count).from_address(found.value))
