"""A stand-in for cuDNN's own functions: called like C functions, on arrays in host memory.

It knows only what `chainer_fast.cudnn.normalization` calls, and fails where cuDNN would.
"""

import ctypes

import numpy as np

from chainer_fast.cudnn import normalization

SUCCESS, BAD_PARAM = 0, 2000
DTYPES = {0: np.dtype("f4"), 2: np.dtype("f2")}
ALIGNMENT = 16


class Functions:
    """cuDNN as a library.

    Parameters
    ----------
    cudnn
        The stand-in for nvidia-cudnn-frontend, whose handles these functions take.
    """

    def __init__(self, cudnn):
        self._cudnn = cudnn
        self._descriptors = {}
        self.status = SUCCESS
        for name, types in normalization.SIGNATURES.items():
            # Otherwise, Python would not convert arguments as C does.
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            setattr(self, name, prototype(getattr(self, f"_{name}")))
        self.cudnnGetErrorString = lambda status: b"CUDNN_STATUS_BAD_PARAM"

    def _cudnnCreateTensorDescriptor(self, target):
        target[0] = 1 + len(self._descriptors)
        self._descriptors[target[0]] = None
        return SUCCESS

    def _cudnnSetTensor4dDescriptor(self, descriptor, order, dtype, *shape):
        if order != 0 or dtype not in DTYPES or min(shape) < 1:
            return BAD_PARAM
        self._descriptors[descriptor] = (DTYPES[dtype], shape)
        return SUCCESS

    def _cudnnBatchNormalizationForwardTraining(self, handle, mode, one, zero, *arguments):
        x_like, x, y_like, y, statistics, gamma, beta, weight, *rest = arguments
        mean_of_means, mean_of_variances, eps, mean, inv_std = rest
        if self.status or not self._replaces(mode, one, zero):
            return self.status or BAD_PARAM
        x, y = self._at(x_like, x), self._at(y_like, y)
        gamma, beta, mean, inv_std = (
            self._at(statistics, pointer) for pointer in (gamma, beta, mean, inv_std)
        )
        if (mean_of_means is None) != (mean_of_variances is None):
            return BAD_PARAM
        values, axes = x.astype("f8"), (0, 2, 3)
        mean[...] = values.mean(axes, keepdims=True)
        variance = values.var(axes, keepdims=True)
        inv_std[...] = (variance + eps) ** -0.5
        y[...] = gamma * (values - mean) * inv_std + beta
        if mean_of_means is not None:
            unbiased = values.var(axes, keepdims=True, ddof=1)
            for pointer, new in ((mean_of_means, mean), (mean_of_variances, unbiased)):
                average = self._at(statistics, pointer)
                average[...] = weight * new + (1 - weight) * average
        return self._done("batchnorm", handle)

    def _cudnnBatchNormalizationBackward(
        self, handle, mode, one, zero, one_again, zero_again, *arguments
    ):
        x_like, x, gy_like, gy, gx_like, gx, statistics, gamma, *rest = arguments
        ggamma, gbeta, _, mean, inv_std = rest
        if not self._replaces(mode, one, zero) or not self._replaces(mode, one_again, zero_again):
            return BAD_PARAM
        x, gy, gx = self._at(x_like, x), self._at(gy_like, gy), self._at(gx_like, gx)
        gamma, ggamma, gbeta, mean, inv_std = (
            self._at(statistics, pointer) for pointer in (gamma, ggamma, gbeta, mean, inv_std)
        )
        x_hat, values, axes = (x - mean.astype("f8")) * inv_std, gy.astype("f8"), (0, 2, 3)
        gbeta[...] = values.sum(axes, keepdims=True)
        ggamma[...] = (values * x_hat).sum(axes, keepdims=True)
        count = x.size // gamma.size
        gx[...] = gamma * inv_std * (values - (gbeta + x_hat * ggamma) / count)
        return self._done("batchnorm_backward", handle)

    @staticmethod
    def _replaces(mode, one, zero):
        factors = [ctypes.c_float.from_address(pointer).value for pointer in (one, zero)]
        return mode == 1 and factors == [1, 0]

    def _at(self, descriptor, pointer):
        dtype, shape = self._descriptors[descriptor]
        assert pointer % ALIGNMENT == 0
        raw = (ctypes.c_char * (dtype.itemsize * int(np.prod(shape)))).from_address(pointer)
        return np.ndarray(shape, dtype, raw)

    def _done(self, name, handle):
        self._cudnn.log.append((name, self._cudnn.handle_at(handle).stream))
        return SUCCESS
