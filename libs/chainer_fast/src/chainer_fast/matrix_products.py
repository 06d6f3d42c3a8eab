"""Matrix products that a CUDA graph can record, with the rules of NumPy's.

CuPy refuses cuBLAS while a stream records, since cuBLAS would allocate a workspace. Here it gets
one. ``ctypes`` calls the four functions needed from the library that CuPy has loaded:
nvmath-python has them too, but takes 22 MB and needs cuda-core, which GPU machines may lack.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from numpy.lib.array_utils import normalize_axis_tuple

from chainer_fast.gpu import Gpu

# NVIDIA recommends this size for Hopper.
WORKSPACE_BYTES = 32 << 20
_MOST = 2**31 - 1
# cudaDataType and cublasComputeType_t: products of float16 are added up in float32.
_DTYPES = {"e": (2, 68), "f": (0, 68), "d": (1, 70)}
_TF32, _ANY_ALGORITHM = 77, -1
_INT, _LONG, _ADDRESS = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
_BEFORE = [_ADDRESS, _INT, _INT, _INT, _INT, _INT]
_MATRIX, _STEP = [_ADDRESS, _INT, _INT], [_LONG]
_ARGUMENTS = {
    "cublasCreate_v2": [_ADDRESS],
    "cublasSetStream_v2": [_ADDRESS, _ADDRESS],
    "cublasSetWorkspace_v2": [_ADDRESS, _ADDRESS, ctypes.c_size_t],
    "cublasGemmEx": [
        *(*_BEFORE, _ADDRESS, *_MATRIX, *_MATRIX, _ADDRESS, *_MATRIX),
        *(_INT, _INT),
    ],
    "cublasGemmStridedBatchedEx": [
        *(*_BEFORE, _ADDRESS, *_MATRIX, *_STEP, *_MATRIX, *_STEP, _ADDRESS, *_MATRIX, *_STEP),
        *(_INT, _INT, _INT),
    ],
}


def can_multiply(*dtypes: Any) -> bool:
    """Return whether the product of arrays with these dtypes is one that `Products` computes."""
    return numpy.result_type(*dtypes).char in _DTYPES


class Products:
    """Computes products by cuBLAS, with a handle and a workspace for each thread and device.

    Parameters
    ----------
    gpu
        GPU that holds the arrays.
    library
        cuBLAS, as `ctypes.CDLL` loads it.
    """

    def __init__(self, gpu: Gpu, library: Any) -> None:
        self._gpu, self._library = gpu, library
        self._local = _Local()
        for name, types in _ARGUMENTS.items():
            getattr(library, name).argtypes = types
        self._compute = {char: kind for char, (_, kind) in _DTYPES.items()}
        if os.environ.get("CUPY_TF32", "0") not in ("", "0"):
            self._compute["f"] = _TF32

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """Return the product of two arrays, as `numpy.matmul` defines it.

        Raises
        ------
        RuntimeError
            If cuBLAS fails.
        TypeError
            If the dtype of the product is not float16, float32 or float64.
        ValueError
            If the shapes do not match, or are too large for cuBLAS.
        """
        asked = functools.partial(_text_of, a, b)  # the names of dtypes take time
        dtype = numpy.result_type(a.dtype, b.dtype)
        if not can_multiply(dtype):
            raise TypeError(f"{asked()}: expected float16, float32 or float64")
        if not (a.ndim and b.ndim):
            raise ValueError(f"{asked()}: expected at least one axis")
        left, right = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
        (m, k), (rows, n) = left.shape[-2:], right.shape[-2:]
        if k != rows:
            raise ValueError(f"{asked()}: the first has {k} columns, but the second {rows} rows")
        batch = numpy.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        shape = (*batch, *[m] * (a.ndim > 1), *[n] * (b.ndim > 1))
        if out is not None and out.shape != shape:
            raise ValueError(f"{asked()}: expected out to have shape {shape}, got {out.shape}")
        if not shape:
            return _stored(_inner(a, b, dtype), out)
        y = out
        if y is None or y.dtype != dtype or not y.flags.c_contiguous or y is a or y is b:
            y = self._gpu.empty(shape, dtype)
        if k == 0:
            y[...] = 0
        elif y.size:
            self._multiply(left, right, y, (batch, m, n, k), asked)
        return _stored(y, out)

    def dot(self, a: Any, b: Any, out: Any = None) -> Any:
        """Return the product of two arrays with axes, as `numpy.dot` defines it.

        Raises the same errors as `matmul`.
        """
        if a.ndim <= 2 and b.ndim <= 2:
            return self.matmul(a, b, out)
        return _stored(self.tensordot(a, b, (a.ndim - 1, max(b.ndim - 2, 0))), out)

    def tensordot(self, a: Any, b: Any, axes: Any = 2) -> Any:
        """Return the sum of products over some axes, as `numpy.tensordot` defines it.

        Raises the same errors as `matmul`.
        """
        if numpy.ndim(axes) == 0:
            axes = range(a.ndim - axes, a.ndim), range(axes)
        of_a, of_b = (
            normalize_axis_tuple(each, array.ndim)
            for each, array in zip(axes, (a, b), strict=True)
        )
        summed = [a.shape[axis] for axis in of_a]
        if summed != [b.shape[axis] for axis in of_b]:
            raise ValueError(f"tensordot: shapes {a.shape} and {b.shape} differ on axes {axes}")
        rows, columns = (
            [axis for axis in range(array.ndim) if axis not in used]
            for array, used in ((a, of_a), (b, of_b))
        )
        shape = [*(a.shape[axis] for axis in rows), *(b.shape[axis] for axis in columns)]
        m, k = math.prod(shape[: len(rows)]), math.prod(summed)
        left = a.transpose(*rows, *of_a).reshape(m, k)
        right = b.transpose(*of_b, *columns).reshape(k, math.prod(shape[len(rows) :]))
        return self.matmul(left, right).reshape(shape)

    def _multiply(
        self, a: Any, b: Any, y: Any, sizes: tuple[Any, ...], asked: Callable[[], str]
    ) -> None:
        (batch, m, n, k), dtype = sizes, y.dtype
        count = math.prod(batch)
        kind, number = _DTYPES[dtype.char][0], ctypes.c_double if dtype == "d" else ctypes.c_float
        # Copies freed on return are only reused by later work on this stream.
        a, *of_a = self._readable(a, batch, dtype)
        b, *of_b = self._readable(b, batch, dtype)
        if max(count, m, n, k, of_a[1], of_b[1]) > _MOST:
            raise ValueError(f"{asked()}: too large, as cuBLAS counts up to {_MOST}")
        # To cuBLAS, whose matrices are in column-major order, all these are transposed.
        matrices = [
            (self._gpu.pointer(array), kind, leading, *[step] * (count > 1))
            for array, leading, step in ((b, *of_b[1:]), (a, *of_a[1:]), (y, n, m * n))
        ]
        name = "cublasGemmStridedBatchedEx" if count > 1 else "cublasGemmEx"
        one, zero = ctypes.byref(number(1)), ctypes.byref(number(0))
        scaled = (one, *matrices[0], *matrices[1], zero, *matrices[2])
        rest = (*[count] * (count > 1), self._compute[dtype.char], _ANY_ALGORITHM)
        self._call(name, self._handle(), of_b[0], of_a[0], n, m, k, *scaled, *rest, asked=asked)

    def _readable(self, array: Any, batch: Sequence[int], dtype: Any) -> tuple[Any, ...]:
        """Return an array and its layout; a copy if cuBLAS cannot read it."""
        if array.dtype == dtype and (layout := _layout(array, batch)):
            return array, *layout
        copy = self._gpu.empty(array.shape, dtype)
        copy[...] = array
        if (layout := _layout(copy, batch)) is None:
            copy = self._gpu.empty((*batch, *array.shape[-2:]), dtype)
            copy[...] = array
            layout = _layout(copy, batch)
            assert layout is not None
        return copy, *layout

    def _handle(self) -> Any:
        """Return this thread's handle for the current device, set to the current stream."""
        device = self._gpu.device()
        if device not in self._local.devices:
            handle, workspace = ctypes.c_void_p(), self._gpu.allocate(WORKSPACE_BYTES)
            self._call("cublasCreate_v2", ctypes.byref(handle))
            self._local.devices[device] = handle, workspace
        handle, workspace = self._local.devices[device]
        self._call("cublasSetStream_v2", handle, self._gpu.stream())
        # Another stream would make cuBLAS forget it.
        self._call("cublasSetWorkspace_v2", handle, workspace.ptr, WORKSPACE_BYTES)
        return handle

    def _call(
        self, name: str, *arguments: Any, asked: Callable[[], str] = lambda: "matrix products"
    ) -> None:
        if status := getattr(self._library, name)(*arguments):
            name_of = self._library.cublasGetStatusName
            name_of.restype = ctypes.c_char_p
            raise RuntimeError(f"{asked()}: {name} failed with {name_of(status).decode()}")


class _Local(threading.local):
    def __init__(self) -> None:
        self.devices: dict[int, tuple[Any, Any]] = {}


def _layout(array: Any, batch: Sequence[int]) -> tuple[int, int, int] | None:
    """Return how cuBLAS can read an array, broadcast to a batch of matrices, or None.

    Returns
    -------
    tuple of int
        Whether matrices are transposed, their leading dimension, and the step between them.
    """
    if any(stride % array.itemsize for stride in array.strides):
        return None
    *steps, row, column = (stride // array.itemsize for stride in array.strides)
    *counts, rows, columns = array.shape
    steps = [step if count > 1 else 0 for step, count in zip(steps, counts, strict=True)]
    steps = [0] * (len(batch) - len(steps)) + steps
    axes = [(count, step) for count, step in zip(batch, steps, strict=True) if count > 1]
    step = axes[-1][1] if axes else 0
    if step < 0 or any(step != n * next_ for (_, step), (n, next_) in itertools.pairwise(axes)):
        return None
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return 0, row if rows > 1 else columns, step
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return 1, column if columns > 1 else rows, step
    return None


def _inner(a: Any, b: Any, dtype: Any) -> Any:
    """Return the product of two vectors, added up in float32 at least."""
    wide = numpy.promote_types(dtype, numpy.float32)
    return (a.astype(wide, copy=False) * b).sum(dtype=wide).astype(dtype)


def _text_of(a: Any, b: Any) -> str:
    return f"product of {a.dtype.name} {a.shape} and {b.dtype.name} {b.shape}"


def _stored(result: Any, out: Any) -> Any:
    if out is None or result is out:
        return result
    out[...] = result
    return out


@functools.cache
def the_products() -> Products:
    """Return the products of this process, by the cuBLAS that CuPy uses."""
    cuda = importlib.import_module("cupy").cuda
    importlib.import_module("cupy_backends.cuda.libs.cublas")  # loads it
    return Products(Gpu(), ctypes.CDLL(f"libcublas.so.{cuda.runtime.runtimeGetVersion() // 1000}"))
