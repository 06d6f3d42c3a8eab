"""Batch normalization of channels-last images by cuDNN, with ReLU and an addition before it.

In this order, cuDNN has kernels that read each image once, and that compute what follows as well.
The frontend plans them too, but refused ReLU's gradient with that of batch normalization.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from typing import Any

from chainer_fast.channels_last.layout import empty
from chainer_fast.cudnn.normalization import REPLACE, STATISTICS, Normalizer, the_normalizer

#: The number of channels must be a multiple of this.
DIVISOR_OF_CHANNELS = 4

_POINTER, _INT, _DOUBLE, _SIZE = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_double,
    ctypes.c_size_t,
)
_CALL = [_POINTER, _INT, _INT]  # handle, mode, operations
_SIZE_OUT = ctypes.POINTER(_SIZE)
#: Types of the arguments of the functions used here. All functions return a status.
SIGNATURES: dict[str, list[Any]] = {
    "cudnnCreateActivationDescriptor": [ctypes.POINTER(_POINTER)],
    "cudnnSetActivationDescriptor": [_POINTER, _INT, _INT, _DOUBLE],
    "cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize": [
        *(*_CALL, *[_POINTER] * 5),  # descriptors of x, z, y, statistics, activation
        _SIZE_OUT,
    ],
    "cudnnGetBatchNormalizationBackwardExWorkspaceSize": [
        *(*_CALL, *[_POINTER] * 7),  # of x, y, gy, gz, gx, statistics, activation
        _SIZE_OUT,
    ],
    "cudnnGetBatchNormalizationTrainingExReserveSpaceSize": [
        *(*_CALL, _POINTER, _POINTER),  # descriptors of the activation and of x
        _SIZE_OUT,
    ],
    "cudnnBatchNormalizationForwardTrainingEx": [
        *(*_CALL, _POINTER, _POINTER),  # how to blend
        *[_POINTER] * 6,  # x, z and y, each after its descriptor
        *[_POINTER] * 3,  # the descriptor of statistics, gamma, beta
        *(_DOUBLE, _POINTER, _POINTER),  # weight of the batch in the averages, the averages
        *(_DOUBLE, _POINTER, _POINTER),  # eps, mean, 1 / standard deviation
        *(_POINTER, _POINTER, _SIZE, _POINTER, _SIZE),  # activation, workspace, what is kept
    ],
    "cudnnBatchNormalizationBackwardEx": [
        *(*_CALL, *[_POINTER] * 4),  # how to blend
        *[_POINTER] * 10,  # x, y, gy, gz and gx, each after its descriptor
        *[_POINTER] * 5,  # the descriptor of statistics, gamma, beta, both gradients
        *(_DOUBLE, _POINTER, _POINTER),  # eps, mean, 1 / standard deviation
        *(_POINTER, _POINTER, _SIZE, _POINTER, _SIZE),  # activation, workspace, what is kept
    ],
}
# Constants from cudnn_graph.h and cudnn_ops.h.
_PERSISTENT = 2
_RELU, _ZERO_FOR_NAN = 1, 0


class Then(IntEnum):
    """What the kernel computes after the normalization; the values are cuDNN's."""

    NOTHING = 0
    RELU = 1
    ADD_RELU = 2


class FusedNormalizer:
    """Starts cuDNN's kernels, on the current stream.

    Parameters
    ----------
    normalizer
        Normalizer that has descriptors and the GPU.
    """

    def __init__(self, normalizer: Normalizer) -> None:
        self.normalizer, self.gpu = normalizer, normalizer.runner.gpu
        normalizer.declare(SIGNATURES)
        self._relu = _POINTER()
        normalizer.call("cudnnCreateActivationDescriptor", self._relu)
        normalizer.call("cudnnSetActivationDescriptor", self._relu, _RELU, _ZERO_FOR_NAN, 0)
        self._sizes = functools.lru_cache(1024)(self._find_sizes)

    def forward(self, call: Normalization, then: Then, z: Any, y: Any, averages: Any) -> None:
        """Compute ``y``, the mean and 1 / standard deviation of a call, and what it keeps."""
        gpu, x = self.gpu, call.x
        images, statistics = self.normalizer.describe(x.shape, x.dtype, channels_last=True)
        size, _, n_kept = self._sizes(gpu.device(), x.shape, x.dtype, then)
        workspace, kept = gpu.allocate(size), gpu.allocate(n_kept)
        self.normalizer.call(
            "cudnnBatchNormalizationForwardTrainingEx",
            *(self._handle(), _PERSISTENT, then, *REPLACE),
            *(images, gpu.pointer(x)),
            *((images, gpu.pointer(z)) if then is Then.ADD_RELU else (None, None)),
            *(images, gpu.pointer(y), statistics),
            *(gpu.pointer(call.gamma), gpu.pointer(call.beta)),
            *(1 - call.decay, *(map(gpu.pointer, averages) if averages else (None, None))),
            *(call.eps, gpu.pointer(call.mean), gpu.pointer(call.inv_std)),
            *(self._relu if then else None, workspace.ptr, size, kept.ptr, n_kept),
        )
        # Gradients stay those of the fused call if the normalization alone is computed once more.
        if then or not call.then:
            call.kept, call.then = kept, then

    def backward(self, call: Normalization, gy: Any, y: Any) -> tuple[Any, Any, Any, Any]:
        """Return the gradients with respect to x, gamma, beta, and z, or None."""
        gpu, x, then = self.gpu, call.x, call.then
        gy = self.readable(gy)
        images, statistics = self.normalizer.describe(x.shape, x.dtype, channels_last=True)
        _, size, n_kept = self._sizes(gpu.device(), x.shape, x.dtype, then)
        workspace = gpu.allocate(size)
        gx = empty(gpu, x.shape, x.dtype)
        gz = empty(gpu, x.shape, x.dtype) if then is Then.ADD_RELU else None
        ggamma, gbeta = (gpu.empty(call.gamma.shape, STATISTICS) for _ in range(2))
        self.normalizer.call(
            "cudnnBatchNormalizationBackwardEx",
            *(self._handle(), _PERSISTENT, then, *REPLACE, *REPLACE),
            *(images, gpu.pointer(x)),
            *((images, gpu.pointer(y)) if then else (None, None)),
            *(images, gpu.pointer(gy)),
            *((None, None) if gz is None else (images, gpu.pointer(gz))),
            *(images, gpu.pointer(gx), statistics),
            *map(gpu.pointer, (call.gamma, call.beta, ggamma, gbeta)),
            *(call.eps, gpu.pointer(call.mean), gpu.pointer(call.inv_std)),
            *(self._relu if then else None, workspace.ptr, size, call.kept.ptr, n_kept),
        )
        return gx, ggamma, gbeta, gz

    def readable(self, images: Any) -> Any:
        """Return images that lie channels last, where cuDNN can read them."""
        return self.normalizer.runner.readable(images, channels_last=True)

    def _handle(self) -> Any:
        return self.normalizer.runner.handle().backend_handle

    def _find_sizes(
        self, device: int, shape: tuple[int, ...], dtype: Any, then: Then
    ) -> tuple[int, int, int]:
        """Return the bytes of workspace, forward and backward, and those to keep in between."""
        images, statistics = self.normalizer.describe(shape, dtype, channels_last=True)
        call = (self._handle(), _PERSISTENT, then)
        relu, y = (self._relu, images) if then else (None, None)
        z = images if then is Then.ADD_RELU else None
        sizes = [_SIZE() for _ in range(3)]
        for name, descriptors, size in zip(
            (
                "cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize",
                "cudnnGetBatchNormalizationBackwardExWorkspaceSize",
                "cudnnGetBatchNormalizationTrainingExReserveSpaceSize",
            ),
            (
                (images, z, images, statistics, relu),
                (images, y, images, z, images, statistics, relu),
                (relu, images),
            ),
            sizes,
            strict=True,
        ):
            self.normalizer.call(name, *call, *descriptors, size)
        forward, backward, kept = (size.value for size in sizes)
        return forward, backward, kept


class Normalization:
    """One call of batch normalization, whose result may be computed with what follows it.

    Parameters
    ----------
    normalizer
        What starts the kernels.
    x
        Channels-last images in float16.
    gamma, beta, eps, decay, averages
        See `Normalizer.normalize`.
    """

    def __init__(
        self,
        normalizer: FusedNormalizer,
        x: Any,
        gamma: Any,
        beta: Any,
        eps: float,
        decay: float,
        averages: Any,
    ) -> None:
        readable = normalizer.normalizer.runner.readable
        self._normalizer, self.x = normalizer, normalizer.readable(x)
        self.gamma, self.beta = readable(gamma), readable(beta)
        self.eps, self.decay = eps, decay
        #: The averages, until they have moved.
        self.averages = averages
        self.mean, self.inv_std = (normalizer.gpu.empty(gamma.shape, STATISTICS) for _ in range(2))
        #: What gradients are computed of, and memory that cuDNN keeps for them.
        self.then = Then.NOTHING
        self.kept: Any = None
        #: Whether others than ReLU read what lies between, so that gradients are computed apart.
        self.is_shared = False
        self._passed: tuple[Any, tuple[Any, Any, Any]] | None = None

    def empty(self) -> Any:
        """Return an uninitialized array for a result."""
        return empty(self._normalizer.gpu, self.x.shape, self.x.dtype)

    def launch(self, then: Then = Then.NOTHING, z: Any = None, y: Any = None) -> Any:
        """Return the normalized images, or what follows. Only the first launch moves averages."""
        y = self.empty() if y is None else y
        if z is not None:
            z = self._normalizer.readable(z)
        averages, self.averages = self.averages, None
        self._normalizer.forward(self, then, z, y, averages)
        return y

    def pass_through(self, gy: Any, y: Any) -> Any:
        """Compute all gradients, given that of what follows the normalization.

        Returns the gradient with respect to the other addend, if any, or ``gy``. Given the same
        array, `gradients` returns the others.
        """
        gx, ggamma, gbeta, gz = self._normalizer.backward(self, gy, y)
        passed = gy if gz is None else gz
        self._passed = passed, (gx, ggamma, gbeta)
        return passed

    def gradients(self, gy: Any) -> tuple[Any, Any, Any]:
        """Return the gradients with respect to x, gamma and beta.

        ``gy`` is that with respect to the normalized images, or what `pass_through` has returned.
        """
        passed, self._passed = self._passed, None
        if passed is not None and passed[0] is gy:
            return passed[1]
        if self.then is Then.NOTHING:
            return self._normalizer.backward(self, gy, None)[:3]
        # Something follows the normalization, but its gradient was computed on its own.
        return self._normalizer.normalizer.gradients(
            gy, self.x, self.gamma, self.mean, self.inv_std, self.eps
        )


@functools.cache
def the_fused_normalizer() -> FusedNormalizer:
    """Return the normalizer of this process. The first call loads cuDNN."""
    return FusedNormalizer(the_normalizer())
