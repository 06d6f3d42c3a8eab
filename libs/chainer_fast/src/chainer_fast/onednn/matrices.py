"""Multiply matrices."""

from __future__ import annotations

import numpy

from chainer_fast.onednn import library


def product(a: numpy.ndarray, b: numpy.ndarray) -> numpy.ndarray:
    """Return ``a.dot(b)`` for float32 matrices, each of which may be transposed."""
    (rows, inner), columns = a.shape, b.shape[1]
    c = numpy.empty((rows, columns), numpy.float32)
    a, a_is, a_stride = _operand(a)
    b, b_is, b_stride = _operand(b)
    library.load().dnnl_sgemm(
        *(a_is, b_is, rows, columns, inner, 1.0),
        *(a.ctypes.data, a_stride, b.ctypes.data, b_stride),
        *(0.0, c.ctypes.data, columns),
    )
    return c


def _operand(matrix: numpy.ndarray) -> tuple[numpy.ndarray, bytes, int]:
    """Return a matrix, whether it is transposed, and the length of a row in memory."""
    if matrix.flags.f_contiguous and not matrix.flags.c_contiguous:
        return matrix, b"T", matrix.shape[0]
    return numpy.ascontiguousarray(matrix), b"N", matrix.shape[1]
