"""A stand-in for cuDNN's own functions: called like C functions, on arrays in host memory.

It knows only what `chainer_fast.cudnn` calls, and fails where cuDNN would.
"""

import ctypes

import numpy as np

from chainer_fast.cudnn import fused_normalization, normalization

SUCCESS, BAD_PARAM = 0, 2000
DTYPES = {0: np.dtype("f4"), 2: np.dtype("f2")}
ALIGNMENT = 16
RELU_DESCRIPTOR = 77


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
        signatures = {**normalization.SIGNATURES, **fused_normalization.SIGNATURES}
        for name, types in signatures.items():
            # Otherwise, Python would not convert arguments as C does.
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            setattr(self, name, prototype(getattr(self, f"_{name}")))
        self.cudnnGetErrorString = lambda status: b"CUDNN_STATUS_BAD_PARAM"

    def _cudnnCreateTensorDescriptor(self, target):
        target[0] = 1 + len(self._descriptors)
        self._descriptors[target[0]] = None
        return SUCCESS

    def _cudnnSetTensor4dDescriptor(self, descriptor, order, dtype, *shape):
        if order not in (0, 1) or dtype not in DTYPES or min(shape) < 1:
            return BAD_PARAM
        self._descriptors[descriptor] = (DTYPES[dtype], shape, order == 1)
        return SUCCESS

    def _cudnnBatchNormalizationForwardTraining(self, handle, mode, one, zero, *arguments):
        return self._normalize(mode, one, zero, *arguments) or self._done("batchnorm", handle)

    def _normalize(self, mode, one, zero, *arguments):
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
        return SUCCESS

    def _cudnnBatchNormalizationBackward(self, handle, *arguments):
        return self._differentiate(*arguments) or self._done("batchnorm_backward", handle)

    def _differentiate(self, mode, one, zero, one_again, zero_again, *arguments):
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
        return SUCCESS

    def _cudnnCreateActivationDescriptor(self, target):
        target[0] = RELU_DESCRIPTOR
        return SUCCESS

    def _cudnnSetActivationDescriptor(self, descriptor, kind, nan, limit):
        is_relu = (descriptor, kind, nan, limit) == (RELU_DESCRIPTOR, 1, 0, 0)
        return SUCCESS if is_relu else BAD_PARAM

    def _cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
        self, handle, mode, then, x_like, z_like, y_like, statistics, relu, size
    ):
        size[0] = 64
        return self._is_possible(mode, then, x_like, z_like, y_like, relu)

    def _cudnnGetBatchNormalizationBackwardExWorkspaceSize(
        self, handle, mode, then, x_like, y_like, gy_like, gz_like, gx_like, statistics, relu, size
    ):
        size[0] = 32
        if bool(then) != bool(y_like) or {gy_like, gx_like} != {x_like}:
            return BAD_PARAM
        return self._is_possible(mode, then, x_like, gz_like, gx_like, relu)

    def _cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
        self, handle, mode, then, relu, x_like, size
    ):
        size[0] = self._n_kept(then, x_like)
        return SUCCESS

    def _cudnnBatchNormalizationForwardTrainingEx(self, handle, mode, then, one, zero, *arguments):
        x_like, x, z_like, z, y_like, y, statistics, gamma, beta, *rest = arguments
        *rest, relu, _, size, kept, n_kept = rest
        if status := self._is_possible(mode, then, x_like, z_like, y_like, relu):
            return status
        if size != 64 or n_kept != self._n_kept(then, x_like):
            return BAD_PARAM
        status = self._normalize(
            1, one, zero, x_like, x, y_like, y, statistics, gamma, beta, *rest
        )
        y = self._at(y_like, y)
        if then:
            # Unlike two kernels, one does not round the result of the normalization.
            mean, inv_std = (self._at(statistics, pointer) for pointer in rest[-2:])
            gamma, beta = self._at(statistics, gamma), self._at(statistics, beta)
            sums = gamma * (self._at(x_like, x).astype("f8") - mean) * inv_std + beta
            if z is not None:
                sums += self._at(z_like, z)
            y[...] = np.maximum(sums, 0)
            self._bytes(kept, n_kept)[...] = (y > 0).ravel()
        return status or self._done(f"batchnorm_{then}", handle)

    def _cudnnBatchNormalizationBackwardEx(
        self, handle, mode, then, one, zero, one_again, zero_again, *arguments
    ):
        x_like, x, _, y, gy_like, gy, gz_like, gz, gx_like, gx, *rest = arguments
        statistics, gamma, _, *rest, relu, _, size, kept, n_kept = rest
        if status := self._is_possible(mode, then, x_like, gz_like, gx_like, relu):
            return status
        if size != 32 or n_kept != self._n_kept(then, x_like) or bool(then) != bool(y):
            return BAD_PARAM
        values = self._at(gy_like, gy).copy()
        if then:
            values *= self._bytes(kept, n_kept).reshape(values.shape)
        if gz is not None:
            self._at(gz_like, gz)[...] = values
        values = flat_copy(values)
        status = self._differentiate(
            *(1, one, zero, one_again, zero_again, x_like, x),
            *(gy_like, values.ctypes.data, gx_like, gx, statistics, gamma, *rest),
        )
        return status or self._done(f"batchnorm_backward_{then}", handle)

    def _is_possible(self, mode, then, x_like, z_like, y_like, relu):
        dtype, shape, is_channels_last = self._descriptors[x_like]
        possible = mode == 2 and is_channels_last and dtype == "f2" and shape[1] % 4 == 0
        possible &= y_like == x_like and z_like == (x_like if then == 2 else None)
        possible &= relu == (RELU_DESCRIPTOR if then else None)
        return SUCCESS if possible else BAD_PARAM

    def _n_kept(self, then, x_like):
        return int(np.prod(self._descriptors[x_like][1])) if then else 0

    @staticmethod
    def _bytes(pointer, size):
        return np.ndarray(size, bool, (ctypes.c_char * size).from_address(pointer))

    @staticmethod
    def _replaces(mode, one, zero):
        factors = [ctypes.c_float.from_address(pointer).value for pointer in (one, zero)]
        return mode == 1 and factors == [1, 0]

    def _at(self, descriptor, pointer):
        dtype, shape, is_channels_last = self._descriptors[descriptor]
        assert pointer % ALIGNMENT == 0
        raw = (ctypes.c_char * (dtype.itemsize * int(np.prod(shape)))).from_address(pointer)
        if is_channels_last:
            n, c, h, w = shape
            return np.ndarray((n, h, w, c), dtype, raw).transpose(0, 3, 1, 2)
        return np.ndarray(shape, dtype, raw)

    def _done(self, name, handle):
        self._cudnn.log.append((name, self._cudnn.handle_at(handle).stream))
        return SUCCESS


def flat_copy(images):
    """Return a copy in the order of memory, at an address that cuDNN can read."""
    values = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    room = np.empty(values.size + ALIGNMENT, values.dtype)
    start = -room.ctypes.data % ALIGNMENT // values.itemsize
    room[start : start + values.size] = values.ravel()
    return room[start : start + values.size]
