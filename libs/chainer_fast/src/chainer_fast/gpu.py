"""The operations on a GPU that ``cudnn`` and ``matrix_products`` need."""

from __future__ import annotations

import importlib
from typing import Any

from chainer_fast.channels_last.kernels import the_kernels


class Gpu:
    """A GPU with CuPy. Tests replace it."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")

    def device(self) -> int:
        """Return the number of the current device."""
        return int(self._cupy.cuda.runtime.getDevice())

    def capability(self) -> int:
        """Return the compute capability of the current device, such as 90 for 9.0."""
        return int(self._cupy.cuda.Device().compute_capability)

    def stream(self) -> int:
        """Return the address of the current stream."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    def synchronize(self) -> None:
        """Wait for all work of the current device."""
        self._cupy.cuda.Device().synchronize()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an uninitialized array."""
        return self._cupy.empty(shape, dtype)

    def allocate(self, size: int) -> Any:
        """Allocate memory at ``ptr``, which is freed with the returned object."""
        return self._cupy.cuda.alloc(size)

    def copy(self, array: Any) -> Any:
        """Return a dense copy of an array."""
        return self._cupy.array(array, order="C")

    def pointer(self, array: Any) -> int:
        """Return the address of the first element of an array."""
        return int(array.data.ptr)

    def padded(self, images: Any, n_channels: int) -> Any:
        """Return a channels-last copy of float16 images, with more channels: zeros."""
        return the_kernels().padded(images, n_channels)

    def add_bias(self, images: Any, bias: Any) -> None:
        """Add a number to each channel of channels-last float16 images, in place."""
        the_kernels().add_bias(images, bias)
