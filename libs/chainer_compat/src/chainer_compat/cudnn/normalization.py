"""Batch normalization by functions of cuDNN's own, which nvidia-cudnn-frontend does not have.

What the frontend has are graphs, and those are for another order of axes than Chainer's: cuDNN
9.19 plans them, with copies into that order and back, and then refuses to execute them. These
functions take Chainer's order. cuDNN 9 calls them deprecated, but has them, and PyTorch uses them.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from chainer_compat.cudnn.runner import Runner, the_runner

#: The dtype of all that there is one of per channel.
STATISTICS = "float32"
#: What takes more is slower than Chainer's own code, or refused.
MOST_IMAGES = 65535

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_double
#: The types of the arguments of the functions that are used. All return a status.
SIGNATURES: dict[str, list[Any]] = {
    "cudnnCreateTensorDescriptor": [ctypes.POINTER(_POINTER)],
    "cudnnSetTensor4dDescriptor": [_POINTER, *[_INT] * 6],
    "cudnnBatchNormalizationForwardTraining": [
        *(_POINTER, _INT, _POINTER, _POINTER),  # handle, mode, how to blend
        *[_POINTER] * 4,  # x and y, each after its descriptor
        *[_POINTER] * 3,  # the descriptor of statistics, gamma, beta
        *(_DOUBLE, _POINTER, _POINTER),  # a weight, and the averages in which it has this weight
        *(_DOUBLE, _POINTER, _POINTER),  # eps, mean, 1 / standard deviation
    ],
    "cudnnBatchNormalizationBackward": [
        *(_POINTER, _INT, *[_POINTER] * 4),  # handle, mode, how to blend
        *[_POINTER] * 6,  # x, gy and gx, each after its descriptor
        *[_POINTER] * 4,  # the descriptor of statistics, gamma and both gradients
        *(_DOUBLE, _POINTER, _POINTER),  # eps, mean, 1 / standard deviation
    ],
}
# Of cudnn_graph.h and cudnn_ops.h.
_ROW_MAJOR = 0
_DTYPES = {"float32": 0, "float16": 2}
_STATISTICS_PER_CHANNEL = 1
# Results replace what is there.
_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)
_REPLACE = (ctypes.addressof(_ONE), ctypes.addressof(_ZERO))


class Normalizer:
    """Normalizes batches of images during training, on the current stream.

    Parameters
    ----------
    runner
        Has the handles, and knows the GPU.
    library
        cuDNN, as a library of C functions.
    """

    def __init__(self, runner: Runner, library: Any) -> None:
        self.runner = runner
        self._library = library
        #: They are only read, so threads may share them.
        self.describe = functools.cache(self._describe)
        library.cudnnGetErrorString.restype = ctypes.c_char_p
        for name, types in SIGNATURES.items():
            getattr(library, name).argtypes = types

    def normalize(
        self, x: Any, gamma: Any, beta: Any, eps: float, decay: float, averages: Any
    ) -> tuple[Any, Any, Any]:
        """Normalize by the batch's own statistics.

        Parameters
        ----------
        x
            Images: dense, of four axes, float16 or float32.
        gamma, beta
            Of float32, as are all other arrays with one element per channel.
        eps
            Is added to the variance.
        decay
            How much of the averages stays.
        averages
            Running averages of the means and of the unbiased variances, which are updated; or
            None.

        Returns
        -------
        tuple
            y, the means, and 1 / standard deviation.
        """
        gpu = self.runner.gpu
        x, gamma, beta = map(self.runner.readable, (x, gamma, beta))
        images, statistics = self.describe(x.shape, x.dtype)
        y, mean, inv_std = self._results(x, gamma)
        self._call(
            "cudnnBatchNormalizationForwardTraining",
            *(self.runner.handle().backend_handle, _STATISTICS_PER_CHANNEL, *_REPLACE),
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
        self._call(
            "cudnnBatchNormalizationBackward",
            *(self.runner.handle().backend_handle, _STATISTICS_PER_CHANNEL, *_REPLACE, *_REPLACE),
            *(images, gpu.pointer(x), images, gpu.pointer(gy), images, gpu.pointer(gx)),
            *(statistics, gpu.pointer(gamma), gpu.pointer(ggamma), gpu.pointer(gbeta)),
            *(eps, gpu.pointer(mean), gpu.pointer(inv_std)),
        )
        return gx, ggamma, gbeta

    def _results(self, x: Any, gamma: Any) -> tuple[Any, Any, Any]:
        """Return arrays to be written: one like x, and two with an element per channel."""
        empty = self.runner.gpu.empty
        statistics = (empty(gamma.shape, STATISTICS) for _ in range(2))
        return empty(x.shape, x.dtype), *statistics

    def _describe(self, shape: tuple[int, ...], dtype: Any) -> list[Any]:
        """Return cuDNN's descriptors of images and of their statistics, which are kept."""
        found = []
        for described, of in ((shape, dtype.name), ((1, shape[1], 1, 1), STATISTICS)):
            descriptor = _POINTER()
            self._call("cudnnCreateTensorDescriptor", descriptor)
            kind = (_ROW_MAJOR, _DTYPES[of])
            self._call("cudnnSetTensor4dDescriptor", descriptor, *kind, *described)
            found.append(descriptor.value)
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            reason = self._library.cudnnGetErrorString(status).decode()
            version = self.runner.cudnn.backend_version_string()
            raise RuntimeError(
                f"{name} of cuDNN {version} failed: {reason}. Under "
                "chainer.using_config('use_cudnn', 'never') Chainer's own code computes it."
            )


@functools.cache
def the_normalizer() -> Normalizer:
    """Return the one of this process. The first call loads cuDNN."""
    runner = the_runner()
    # The frontend has loaded it, from wherever that is: by its name, this is the same library.
    return Normalizer(runner, ctypes.CDLL("libcudnn.so.9"))
