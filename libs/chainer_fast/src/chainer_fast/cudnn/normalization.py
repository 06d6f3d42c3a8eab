"""Batch normalization by cuDNN's C functions, which nvidia-cudnn-frontend does not have.

The frontend only has graphs, which need a different order of axes than Chainer's: cuDNN 9.19 plans
them, with copies into that order and back, and then refuses to execute them. These functions take
Chainer's order. cuDNN 9 deprecates them but still has them, and PyTorch uses them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from chainer_fast.cudnn.runner import Runner, the_runner

#: Dtype of everything that has one element per channel.
STATISTICS = "float32"
#: Larger batches are slower than with Chainer's own code, or are refused.
MOST_IMAGES = 65535

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_double
#: Types of the arguments of the functions used here. All functions return a status.
SIGNATURES: dict[str, list[Any]] = {
    "cudnnCreateTensorDescriptor": [ctypes.POINTER(_POINTER)],
    "cudnnSetTensor4dDescriptor": [_POINTER, *[_INT] * 6],
    "cudnnBatchNormalizationForwardTraining": [
        *(_POINTER, _INT, _POINTER, _POINTER),  # handle, mode, how to blend
        *[_POINTER] * 4,  # x and y, each after its descriptor
        *[_POINTER] * 3,  # the descriptor of statistics, gamma, beta
        *(_DOUBLE, _POINTER, _POINTER),  # weight of the batch in the averages, the averages
        *(_DOUBLE, _POINTER, _POINTER),  # eps, mean, 1 / standard deviation
    ],
    "cudnnBatchNormalizationBackward": [
        *(_POINTER, _INT, *[_POINTER] * 4),  # handle, mode, how to blend
        *[_POINTER] * 6,  # x, gy and gx, each after its descriptor
        *[_POINTER] * 4,  # the descriptor of statistics, gamma and both gradients
        *(_DOUBLE, _POINTER, _POINTER),  # eps, mean, 1 / standard deviation
    ],
}
# Constants from cudnn_graph.h and cudnn_ops.h.
_CHANNELS_FIRST, _CHANNELS_LAST = 0, 1
_DTYPES = {"float32": 0, "float16": 2}
_STATISTICS_PER_CHANNEL = 1
# Results replace the old values.
_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)
REPLACE = (ctypes.addressof(_ONE), ctypes.addressof(_ZERO))


class Normalizer:
    """Normalizes batches of images during training, on the current stream.

    Parameters
    ----------
    runner
        Runner that has the handles and the GPU.
    library
        cuDNN as a library of C functions.
    """

    def __init__(self, runner: Runner, library: Any) -> None:
        self.runner = runner
        self._library = library
        #: Descriptors are only read, so threads may share them.
        self.describe = functools.cache(self._describe)
        library.cudnnGetErrorString.restype = ctypes.c_char_p
        self.declare(SIGNATURES)

    def declare(self, signatures: Mapping[str, Sequence[Any]]) -> None:
        """Tell ctypes the types of functions' arguments, by name."""
        for name, types in signatures.items():
            getattr(self._library, name).argtypes = types

    def normalize(
        self, x: Any, gamma: Any, beta: Any, eps: float, decay: float, averages: Any
    ) -> tuple[Any, Any, Any]:
        """Normalize by the batch's own statistics.

        Parameters
        ----------
        x
            Images: a dense array with four axes, in float16 or float32.
        gamma, beta
            Scales and shifts. All arrays with one element per channel are in float32.
        eps
            Number to add to the variance.
        decay
            Weight of the old running averages.
        averages
            Running averages of the means and of the unbiased variances, which are updated; or
            None.

        Returns
        -------
        tuple
            The result, the means, and 1 / standard deviation.
        """
        gpu = self.runner.gpu
        x, gamma, beta = map(self.runner.readable, (x, gamma, beta))
        images, statistics = self.describe(x.shape, x.dtype)
        y, mean, inv_std = self._results(x, gamma)
        self.call(
            "cudnnBatchNormalizationForwardTraining",
            *(self.runner.handle().backend_handle, _STATISTICS_PER_CHANNEL, *REPLACE),
            *(images, gpu.pointer(x), images, gpu.pointer(y)),
            *(statistics, gpu.pointer(gamma), gpu.pointer(beta)),
            *(1 - decay, *(map(gpu.pointer, averages) if averages else (None, None))),
            *(eps, gpu.pointer(mean), gpu.pointer(inv_std)),
        )
        return y, mean, inv_std

    def gradients(
        self, gy: Any, x: Any, gamma: Any, mean: Any, inv_std: Any, eps: float
    ) -> tuple[Any, Any, Any]:
        """Return the gradients with respect to x, gamma and beta."""
        gpu = self.runner.gpu
        gy, x, gamma = map(self.runner.readable, (gy, x, gamma))
        images, statistics = self.describe(x.shape, x.dtype)
        gx, ggamma, gbeta = self._results(x, gamma)
        self.call(
            "cudnnBatchNormalizationBackward",
            *(self.runner.handle().backend_handle, _STATISTICS_PER_CHANNEL, *REPLACE, *REPLACE),
            *(images, gpu.pointer(x), images, gpu.pointer(gy), images, gpu.pointer(gx)),
            *(statistics, gpu.pointer(gamma), gpu.pointer(ggamma), gpu.pointer(gbeta)),
            *(eps, gpu.pointer(mean), gpu.pointer(inv_std)),
        )
        return gx, ggamma, gbeta

    def _results(self, x: Any, gamma: Any) -> tuple[Any, Any, Any]:
        """Return arrays to write to: one like x, and two with an element per channel."""
        empty = self.runner.gpu.empty
        statistics = (empty(gamma.shape, STATISTICS) for _ in range(2))
        return empty(x.shape, x.dtype), *statistics

    def _describe(
        self, shape: tuple[int, ...], dtype: Any, *, channels_last: bool = False
    ) -> list[Any]:
        """Return cuDNN's descriptors of images and of their statistics."""
        found = []
        order = _CHANNELS_LAST if channels_last else _CHANNELS_FIRST
        for described, kind in (
            (shape, (order, _DTYPES[dtype.name])),
            ((1, shape[1], 1, 1), (_CHANNELS_FIRST, _DTYPES[STATISTICS])),
        ):
            descriptor = _POINTER()
            self.call("cudnnCreateTensorDescriptor", descriptor)
            self.call("cudnnSetTensor4dDescriptor", descriptor, *kind, *described)
            found.append(descriptor.value)
        return found

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of cuDNN.

        Raises
        ------
        RuntimeError
            If it fails. The message says what to do.
        """
        if status := getattr(self._library, name)(*arguments):
            reason = self._library.cudnnGetErrorString(status).decode()
            version = self.runner.cudnn.backend_version_string()
            raise RuntimeError(
                f"{name} of cuDNN {version} failed: {reason}. Under "
                "chainer.using_config('use_cudnn', 'never') Chainer's own code computes it."
            )


@functools.cache
def the_normalizer() -> Normalizer:
    """Return the normalizer of this process. The first call loads cuDNN."""
    runner = the_runner()
    # The frontend has already loaded cuDNN, and the same name gives the same library.
    return Normalizer(runner, ctypes.CDLL("libcudnn.so.9"))
