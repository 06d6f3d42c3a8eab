"""Messages between ranks: arrays with their layout, and pickled objects.

Both are a `Message`: a small header that MPI pickles, followed by plain buffers.
"""

from __future__ import annotations

import math
import pickle
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, TypeAlias

import chainer
import numpy as np
from typing_extensions import override

from chainermn.agreement import InputError, attempt
from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.reducer import Array

Arrays: TypeAlias = Array | tuple[Array, ...] | list[Array]

# Pickles of up to this many bytes are sent with their header, in one message instead of two.
_INLINE_BYTES = 1 << 16


class Message(ABC):
    """A message; pickling it gives only its header.

    The sender sends the message, then its `buffers`. The receiver fills the `buffers` of the
    message that it has received, then opens it.
    """

    @cached_property
    @abstractmethod
    def buffers(self) -> list[Array]:
        """One-dimensional contiguous buffers, to send or to fill."""

    @abstractmethod
    def open(self) -> Any:
        """Return the object that was sent; on the sender, the object itself."""


class ArrayMessage(Message):
    """An array, or a tuple or list of arrays, of NumPy or CuPy; a list arrives as a tuple.

    Raises
    ------
    TypeError
        If ``data`` is anything else, does not hold numbers, has a mask, or mixes NumPy and CuPy
        arrays.
    """

    def __init__(self, data: Arrays) -> None:
        self.is_tuple = isinstance(data, tuple | list)
        arrays: tuple[Any, ...] = tuple(map(_in_numpy, as_tuple(data)))
        self._data: Arrays | None = arrays if self.is_tuple else arrays[0]
        for array in arrays:
            if not (isinstance(array, np.ndarray) or on_gpu(array)):
                described = f"a tuple or list with {type(array)}" if self.is_tuple else type(array)
                raise TypeError(
                    f"expected an array, or a tuple or list of arrays, got {described}; "
                    "turn a number into an array with np.array(x), and send other objects with "
                    "send_obj, bcast_obj, allreduce_obj, ..."
                )
            if array.dtype.kind not in "biufc":
                raise TypeError(f"expected an array of numbers or bool, got dtype {array.dtype}")
        self.on_gpu = any(on_gpu(array) for array in arrays)
        if self.on_gpu and not all(on_gpu(array) for array in arrays):
            raise TypeError(
                "expected either NumPy or CuPy arrays, got some of both; convert them with "
                "chainer.backends.cuda.to_gpu or to_cpu"
            )
        self.shapes = [array.shape for array in arrays]
        self.dtypes = [array.dtype for array in arrays]

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_data": None}
        state.pop("buffers", None)
        return state

    @cached_property
    @override
    def buffers(self) -> list[Array]:
        if self._data is not None:
            if self.on_gpu:
                return [array.ravel() for array in as_tuple(self._data)]
            return [np.ascontiguousarray(array).reshape(-1) for array in as_tuple(self._data)]
        pairs = zip(self.shapes, self.dtypes, strict=True)
        if self.on_gpu:
            empty = the_gpu().empty
            return [empty(math.prod(shape), dtype) for shape, dtype in pairs]
        return [np.empty(shape, dtype).reshape(-1) for shape, dtype in pairs]

    @override
    def open(self) -> Arrays:
        if self._data is not None:
            return self._data
        pairs = zip(self.buffers, self.shapes, strict=True)
        arrays = tuple(buffer.reshape(shape) for buffer, shape in pairs)
        return arrays if self.is_tuple else arrays[0]

    def __str__(self) -> str:
        pairs = zip(self.dtypes, self.shapes, strict=True)
        described = ", ".join(f"{dtype.name}{list(shape)}" for dtype, shape in pairs)
        described += " in GPU memory" * self.on_gpu
        return f"a tuple ({described})" if self.is_tuple else f"an array {described}"


class ObjectMessage(Message):
    """Any object that can be pickled; arrays in it are not copied (pickle protocol 5, PEP 574).

    Raises
    ------
    TypeError
        If it cannot be pickled.
    """

    def __init__(self, obj: object) -> None:
        self._obj = obj
        self._sizes: list[int]
        out_of_band: list[pickle.PickleBuffer] = []
        try:
            stream = pickle.dumps(obj, protocol=5, buffer_callback=out_of_band.append)
        except Exception as error:
            raise TypeError(f"cannot pickle an object of {type(obj)}: {error}") from error
        self._parts = [
            np.frombuffer(part, np.uint8)
            for part in (memoryview(stream), *(buffer.raw() for buffer in out_of_band))
        ]
        self._inline = sum(part.size for part in self._parts) <= _INLINE_BYTES

    def __getstate__(self) -> dict[str, Any]:
        if self._inline:
            return {"_parts": self._parts, "_inline": True}
        return {"_sizes": [part.size for part in self._parts], "_inline": False}

    @cached_property
    @override
    def buffers(self) -> list[Array]:
        return [] if self._inline else self._parts

    @cached_property
    def _parts(self) -> list[Array]:
        return [np.empty(size, np.uint8) for size in self._sizes]

    @override
    def open(self) -> Any:
        if "_obj" in self.__dict__:
            return self._obj
        stream, *buffers = self._parts
        # Ranks of a job trust each other.
        return pickle.loads(stream.data, buffers=buffers)  # noqa: S301


def describe_array(array: Any) -> str | InputError:
    """Return the dtype, shape and memory of an array, for an agreement of the ranks."""
    return attempt(lambda: str(ArrayMessage(array)))


def as_tuple(data: Arrays) -> tuple[Array, ...]:
    """Return the arrays in ``data`` as a tuple."""
    return tuple(data) if isinstance(data, list | tuple) else (data,)


def _in_numpy(array: Any) -> Any:
    """Return arrays in host memory, and NumPy scalars such as an element, as NumPy arrays."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            "expected an array without a mask, which would be lost, got a masked array; send "
            "array.filled(value), and the mask as an array of its own: "
            "numpy.ma.getmaskarray(array). send_obj, bcast_obj, ... keep masks"
        )
    host_types = (np.generic, *chainer.get_cpu_array_types())
    return array if on_gpu(array) or not isinstance(array, host_types) else np.asarray(array)
