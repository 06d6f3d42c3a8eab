"""Arrays that may be in oneDNN's preferred memory layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy
from numpy.lib.mixins import NDArrayOperatorsMixin

from chainer_fast.onednn import openmp, operations
from chainer_fast.onednn.layouts import FLOAT32, Layout, blocked
from chainer_fast.onednn.primitives import Arg, Tensor

_LITTLE = 1 << 17  # elements

#: Purpose of an array: data to compute with, or a parameter to keep.
dat_array, wgt_array = "d", "w"


class mdarray(NDArrayOperatorsMixin):
    """An array of Chainer that stays in oneDNN's own layout while only oneDNN uses it.

    For all other code, it acts like the result of ``numpy.asarray()``. After the first access, it
    is that NumPy array: a change of one shows in the other. NumPy's elementwise functions do not
    count as an access: they compute in oneDNN's layout.

    Parameters
    ----------
    values
        A NumPy array, which is not copied, or a tensor.
    """

    __slots__ = ("__weakref__", "_array", "_tensor", "dtype", "shape")

    def __init__(self, values: numpy.ndarray | Tensor) -> None:
        self._array: numpy.ndarray | None = None
        self._tensor: Tensor | None = None
        if isinstance(values, Tensor):
            self._tensor = values
            self.shape: tuple[int, ...] = values.layout.shape
            self.dtype: numpy.dtype = values.layout.dtype
        else:
            self._array = values
            self.shape, self.dtype = values.shape, values.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_in_blocks(self) -> bool:
        """Whether the array is still in oneDNN's own layout."""
        return self._tensor is not None

    @property
    def tensor(self) -> Tensor:
        """The values in their current layout."""
        return self._tensor or Tensor.of(numpy.asarray(self))

    def __array__(
        self, dtype: numpy.dtype | None = None, copy: bool | None = None
    ) -> numpy.ndarray:
        """Return the NumPy array that this array becomes."""
        if self._array is None:
            assert self._tensor is not None
            self._array, self._tensor = self._tensor.as_array(), None
        if copy or (dtype is not None and dtype != self.dtype):
            if copy is False:
                raise ValueError(f"an array of {self.dtype} cannot become {dtype} without a copy")
            return self._array.astype(dtype or self.dtype)
        return self._array

    def __array_ufunc__(
        self, ufunc: numpy.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Any:
        if method == "__call__" and options.keys() <= {"out"} and ufunc.signature is None:
            found = _on_blocks(ufunc, inputs, *options.get("out", ()))
            if found is not None:
                return found
        outputs = options.get("out", ())
        if outputs:
            options["out"] = tuple(map(_as_numpy, outputs))
        found = getattr(ufunc, method)(*map(_as_numpy, inputs), **options)
        return outputs[0] if len(outputs) == 1 else found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(numpy.asarray(self), name)

    def __getitem__(self, key: Any) -> Any:
        return numpy.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        numpy.asarray(self)[key] = _as_numpy(value)

    def __len__(self) -> int:
        return len(numpy.asarray(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(numpy.asarray(self))

    def __bool__(self) -> bool:
        return bool(numpy.asarray(self))

    def __int__(self) -> int:
        return int(numpy.asarray(self))

    def __float__(self) -> float:
        return float(numpy.asarray(self))

    def __repr__(self) -> str:
        return f"mdarray({numpy.asarray(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return mdarray, (numpy.asarray(self),)

    def copy(self, order: str = "C") -> mdarray:
        """Return a copy in the same layout."""
        if self._tensor is None:
            return mdarray(numpy.asarray(self).copy())
        return mdarray(Tensor(self._tensor.layout, self._tensor.buffer.copy()))

    def astype(self, dtype: Any, *args: Any, **options: Any) -> Any:
        """Return the array in another dtype, without an access if it already has that dtype."""
        if numpy.dtype(dtype) == self.dtype and not args and options.keys() <= {"copy"}:
            return self.copy() if options.get("copy", True) else self
        array: Any = numpy.asarray(self)
        return array.astype(dtype, *args, **options)

    def sum(self, axis: Any = None, **options: Any) -> Any:
        """Return the sum over axes, for images and batches of images without an access."""
        tensor = self._tensor
        if tensor is not None and tensor.layout.block and not options.get("keepdims"):
            axes = tuple(sorted(axis)) if isinstance(axis, tuple) else axis
            if axes in _SUMS and options.keys() <= {"keepdims"}:
                return _SUMS[axes](tensor)
        return numpy.asarray(self).sum(axis, **options)

    def inplace_axpby(self, a: float, b: float, y: Any) -> mdarray:
        """Set this array, ``x``, to ``a * x + b * y``."""
        x = numpy.asarray(self)
        if a != 1:
            x *= a
        x += b * numpy.asarray(y)
        return self


def array(values: Any, itype: str = dat_array) -> Any:
    """Return an array that oneDNN can read, or the array itself if that is impossible.

    Parameters
    ----------
    values
        An array.
    itype : str
        `wgt_array` copies a NumPy array; by default, memory is shared.
    """
    if isinstance(values, mdarray) or not _is_readable(values) or values.ndim not in (1, 2, 4):
        return values
    return mdarray(values.copy() if itype == wgt_array else values)


def in_blocks(x: mdarray) -> Tensor:
    """Return images in blocks of channels, where most primitives are fastest, if these fit."""
    tensor = x.tensor
    if tensor.layout.is_plain and blocked(x.shape).is_full:
        return tensor.in_layout(blocked(x.shape))
    return tensor


def result(tensor: Tensor) -> numpy.ndarray | mdarray:
    """Return a result for Chainer: a NumPy array if the memory layout is that of one."""
    return tensor.as_array() if tensor.layout.is_plain else mdarray(tensor)


def check_ndim(arrays: Sequence[Any], supported: Sequence[int] = (2, 4)) -> bool:
    """Return whether oneDNN should compute, rather than NumPy, which is faster for a few vectors.

    The first array, the data, must have one of the supported numbers of axes. With several
    threads, oneDNN also computes on a few vectors, because otherwise its threads and those of
    NumPy's BLAS would compete for the cores.
    """
    if arrays[0].ndim not in supported:
        return False
    is_little = arrays[0].ndim == 2 and all(array.size <= _LITTLE for array in arrays)
    return not is_little or openmp.max_threads() > 1


def check_type(arrays: Sequence[Any]) -> bool:
    """Return whether oneDNN can read all arrays, which must be float32 and not empty."""
    return all(isinstance(array, mdarray) or _is_readable(array) for array in arrays)


def _is_readable(array: Any) -> bool:
    return isinstance(array, numpy.ndarray) and array.dtype == FLOAT32 and array.size > 0


def get_array_module(*arrays: Any) -> ModuleType:
    """Return NumPy, whose functions accept an `mdarray` like their own arrays."""
    return numpy


def basic_copyto(target: mdarray, source: Any) -> None:
    """Copy the values of an array into an `mdarray`."""
    target[...] = source


def multi_add(arrays: Sequence[Any]) -> Any:
    """Return the sum of arrays of the same shape."""
    total = arrays[0] + arrays[1]
    for other in arrays[2:]:
        total += other
    return total


def _as_numpy(value: Any) -> Any:
    return numpy.asarray(value) if isinstance(value, mdarray) else value


def _on_blocks(ufunc: numpy.ufunc, inputs: Sequence[Any], out: Any = None) -> Any:
    """Apply an elementwise function in oneDNN's layout, or return None if that is impossible."""
    layout = next(
        (a._tensor.layout for a in inputs if isinstance(a, mdarray) and a._tensor is not None),
        None,
    )
    if layout is None or layout.dtype != FLOAT32 or ufunc.nout != 1:
        return None
    if not layout.is_full:
        return None
    is_sum = ufunc is numpy.add and out is None and layout.size > _LITTLE
    if is_sum and all(isinstance(a, mdarray) and a.shape == layout.shape for a in inputs):
        first, second = (a.tensor for a in inputs)
        return mdarray(*operations.add(layout).run({Arg.SRC: first, Arg.SRC_1: second}))
    operands = [_in_blocks(value, layout) for value in inputs]
    if any(operand is None for operand in operands):
        return None
    if out is None:
        found = numpy.ascontiguousarray(ufunc(*operands))
        if found.dtype == FLOAT32:
            return mdarray(Tensor(layout, found.reshape(-1)))
        return found.transpose(0, 1, 4, 2, 3).reshape(layout.shape)
    tensor = out._tensor if isinstance(out, mdarray) else None
    if tensor is None or tensor.layout is not layout:
        return None
    ufunc(*operands, out=layout.blocks(tensor.buffer))
    return out


def _in_blocks(value: Any, layout: Layout) -> Any:
    """Return an operand in a form that broadcasts with a layout's blocks, or None."""
    if numpy.isscalar(value):
        return value
    if not isinstance(value, mdarray):
        value = numpy.asarray(value)
    if value.shape == layout.shape and value.dtype == FLOAT32:
        tensor = value.tensor if isinstance(value, mdarray) else Tensor.of(value)
        return layout.blocks(tensor.in_layout(layout).buffer)
    value = numpy.asarray(value)
    if value.ndim == 0:
        return value
    shape = (1,) * (4 - value.ndim) + value.shape
    if len(shape) > 4 or any(m not in (1, k) for m, k in zip(shape, layout.shape, strict=True)):
        return None
    n, c, h, w = shape
    channels = (c // layout.block, layout.block) if c > 1 else (1, 1)
    return value.reshape(n, *channels, h, w).transpose(0, 1, 3, 4, 2)


def _sum_of_channels(tensor: Tensor) -> numpy.ndarray:
    blocks = tensor.layout.blocks(tensor.buffer)
    n, groups, h, w, block = blocks.shape
    ones = numpy.ones((1, h * w), numpy.float32)
    rows = numpy.matmul(ones, blocks.reshape(n, groups, h * w, block))
    return rows.sum(axis=0).reshape(-1)[: tensor.layout.shape[1]]


def _sum_of_pictures(tensor: Tensor) -> numpy.ndarray:
    n, c, _, _ = tensor.layout.shape
    return tensor.layout.blocks(tensor.buffer).sum(axis=(2, 3)).reshape(n, -1)[:, :c]


_SUMS = {(0, 2, 3): _sum_of_channels, (2, 3): _sum_of_pictures}
