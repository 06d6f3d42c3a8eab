"""Memory layouts of arrays: oneDNN's memory descriptors."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from ctypes import addressof, c_int, c_int64, c_void_p
from typing import ClassVar

import numpy

from chainer_fast.onednn import library
from chainer_fast.onednn.library import Dims, Handle

_ANY, _BLOCKS_OF_8, _BLOCKS_OF_16 = 1, 102, 78
_AVX512 = 0x27
FLOAT32 = numpy.dtype(numpy.float32)
_DATA_TYPES = {FLOAT32: 3, numpy.dtype(numpy.int32): 4, numpy.dtype("u1"): 6}
_DTYPES = {number: dtype for dtype, number in _DATA_TYPES.items()}
_NDIMS, _DIMS, _DATA_TYPE, _PADDED_DIMS = 256, 257, 258, 260
_INNER_NBLKS, _INNER_BLKS, _INNER_IDXS, _STRIDES = 263, 264, 265, 14


class Layout:
    """The shape, dtype and order in memory of an array. Equal layouts are the same object.

    Attributes
    ----------
    handle
        oneDNN's memory descriptor.
    shape : tuple of int
        Shape of the array in NumPy.
    dtype : numpy.dtype
        float32, or int32 or uint8 for the indices of a pooling.
    size : int
        Number of elements in memory, which padded channels increase.
    block : int
        Number of adjacent channels in layouts such as ``nChw16c``; 0 in other layouts.
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
        self.is_plain = not block_sizes and strides == _dense_strides(shape, shape)
        self.block = 0
        if len(shape) == 4 and block_axes == (1,) and isinstance(block_sizes, tuple):
            (block,) = block_sizes
            n, c, h, w = shape
            groups = -(-c // block)
            if strides == _dense_strides((n, groups, h, w, block), shape)[:4]:
                self.block = block

    @classmethod
    def of(cls, descriptor: int | Handle) -> Layout:
        """Return the layout of a memory descriptor, and copy the descriptor."""
        key = _key(descriptor)
        found = cls._known.get(key)
        if found is None:
            found = cls._known.setdefault(key, cls(_descriptor("clone", descriptor), key))
        return found

    @property
    def is_full(self) -> bool:
        """Whether channels are in blocks and fill them without padding."""
        return self.block > 0 and self.shape[1] % self.block == 0

    def blocks(self, buffer: numpy.ndarray) -> numpy.ndarray:
        """View memory with blocks as (batch, groups of channels, h, w, channels)."""
        n, c, h, w = self.shape
        return buffer.reshape(n, -(-c // self.block), h, w, self.block)


@functools.lru_cache(maxsize=4096)
def plain(shape: tuple[int, ...], dtype: numpy.dtype = FLOAT32) -> Layout:
    """Return the layout of a C-contiguous array."""
    return _strided(shape, [math.prod(shape[axis + 1 :]) for axis in range(len(shape))], dtype)


@functools.lru_cache(maxsize=4096)
def channels_last(shape: tuple[int, int, int, int]) -> Layout:
    """Return the layout of images whose channels are adjacent."""
    _, c, h, w = shape
    return _strided(shape, [c * h * w, 1, c * w, c], FLOAT32)


@functools.lru_cache(maxsize=4096)
def blocked(shape: tuple[int, int, int, int]) -> Layout:
    """Return the layout of images in blocks with as many channels as fit in a register."""
    isa = library.load().dnnl_get_effective_cpu_isa()
    tag = _BLOCKS_OF_16 if isa & _AVX512 == _AVX512 else _BLOCKS_OF_8
    return Layout.of(_tagged(shape, tag))


@functools.lru_cache(maxsize=4096)
def any_layout(shape: tuple[int, ...]) -> Handle:
    """Return a memory descriptor for float32 that lets a primitive choose the order in memory."""
    return _tagged(shape, _ANY)


def _tagged(shape: tuple[int, ...], tag: int) -> Handle:
    kind = _DATA_TYPES[FLOAT32]
    return _descriptor("create_with_tag", len(shape), Dims(*shape), kind, tag)


def _strided(shape: tuple[int, ...], strides: list[int], dtype: numpy.dtype) -> Layout:
    kind = _DATA_TYPES[dtype]
    arguments = len(shape), Dims(*shape), kind, Dims(*strides)
    return Layout.of(_descriptor("create_with_strides", *arguments))


def _descriptor(create: str, *arguments: object) -> Handle:
    return Handle(f"dnnl_memory_desc_{create}", "dnnl_memory_desc_destroy", *arguments)


def _dense_strides(lengths: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of axes with these lengths that are contiguous in memory."""
    strides = [math.prod(lengths[axis + 1 :]) for axis in range(len(lengths))]
    return _relevant(strides, shape)


def _relevant(strides: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides with 0 for axes of one element, whose strides do not matter."""
    return tuple(0 if length == 1 else n for n, length in zip(strides, shape, strict=False))


def _key(descriptor: int | Handle) -> tuple[object, ...]:
    ndim = _number(descriptor, _NDIMS)
    blocks = _number(descriptor, _INNER_NBLKS)
    shape = _numbers(descriptor, _DIMS, ndim)
    return (
        shape,
        _DTYPES[_number(descriptor, _DATA_TYPE)],
        _relevant(_numbers(descriptor, _STRIDES, ndim), shape),
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
