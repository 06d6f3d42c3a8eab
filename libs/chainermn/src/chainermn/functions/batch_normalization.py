"""Normalize batches over all ranks.

The method comes from S. Ioffe and C. Szegedy, "Batch Normalization: Accelerating Deep Network
Training by Reducing Internal Covariate Shift", ICML 2015. Every sum over the batch is also a sum
over the ranks. Numbers of elements are summed too, so batches may differ in size.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, Literal

import chainer
import chainer.functions as F
import numpy as np
from chainer import backend

from chainermn.agreement import InputError, attempt
from chainermn.channels_last import as_shaped, as_stored, is_channels_last
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.collective_communication import allreduce
from chainermn.functions.variables import as_variable

Backend = Literal["auto", "mpi", "nccl"]


def get_communication_backend(
    comm: CommunicatorBase, communication_backend: Backend = "auto"
) -> Literal["mpi", "nccl"]:
    """Return the backend that adds up the statistics of a batch.

    Raises ``ValueError`` if it is unknown, or if it is ``'nccl'`` and ``comm`` does not use NCCL.
    """
    if communication_backend not in ("auto", "mpi", "nccl"):
        raise ValueError(
            "communication_backend must be 'auto', 'mpi' or 'nccl', "
            f"got {communication_backend!r} on rank {comm.rank}"
        )
    if communication_backend == "nccl" and not comm.uses_nccl:
        raise ValueError(
            f"communication_backend='nccl' on rank {comm.rank}: {type(comm).__name__} does not "
            "use NCCL; use 'auto', or a communicator that does"
        )
    return "nccl" if comm.uses_nccl and communication_backend != "mpi" else "mpi"


class MultiNodeBatchNormalization(chainer.FunctionNode):
    """Normalizes with the mean and variance over the batches of all ranks.

    It sums over ``axis``, and updates ``running_mean`` and ``running_var``, if given, in place.
    """

    def __init__(
        self,
        comm: CommunicatorBase,
        eps: float,
        running_mean: Any,
        running_var: Any,
        decay: float,
        axis: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.comm = comm
        self.eps = eps
        self.running_mean = running_mean
        self.running_var = running_var
        self.decay = decay
        self.axis = axis

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """All-reduce the sums of the elements, then those of their squared deviations."""
        self.retain_inputs((0, 1))
        x, gamma, beta = inputs
        xp = backend.get_array_module(x)
        self._expand = tuple(None if i in self.axis else slice(None) for i in range(x.ndim))
        # Sums of many float16 numbers would lose most of their digits.
        self._dtype = np.result_type(gamma.dtype, np.float32)

        total, count = self._add_up_with_count(x)
        mean = total / count
        y = x - mean[self._expand]
        squares = _sum(xp.square(y), self.axis, y.dtype).astype(self._dtype, copy=False)
        var = self.comm.add_up(squares) / count
        inv_std = 1 / xp.sqrt(var + self.eps)
        self._count, self._mean, self._inv_std = count, mean, inv_std
        # In place from here on: a batch is large, and allocating another one takes long.
        y *= (gamma * inv_std)[self._expand]
        y += beta[self._expand]

        if self.running_mean is not None:
            self.running_mean *= self.decay
            self.running_mean += (1 - self.decay) * mean
        if self.running_var is not None:
            self.running_var *= self.decay
            unbiased = count / xp.maximum(count - 1, 1) * var
            self.running_var += (1 - self.decay) * unbiased
        return (y.astype(x.dtype, copy=False),)

    def _add_up_with_count(self, x: Any) -> tuple[Any, Any]:
        """Return the sum and the number of the elements per channel, over all ranks.

        The number is an array without axes, in the memory of ``x``: to read it, the host would
        have to wait for the GPU.
        """
        xp = backend.get_array_module(x)
        total = _sum(x, self.axis, np.result_type(x.dtype, self._dtype))
        own_count = math.prod(x.shape[i] for i in self.axis)
        packed = xp.empty_like(total, self._dtype, shape=total.size + 1)
        packed[:-1] = total.ravel()
        packed[-1] = own_count
        packed = self.comm.add_up(packed)
        count = packed[-1:].reshape(())
        if own_count <= 1:  # otherwise the sum is larger, too
            _check_count(float(count))
        return packed[:-1].reshape(total.shape), count

    def backward(
        self, indexes: tuple[int, ...], gys: tuple[chainer.Variable, ...]
    ) -> tuple[chainer.Variable, ...]:
        """Return the gradients; those of gamma and beta are means over the ranks."""
        x, gamma = self.get_retained_inputs()
        if chainer.config.enable_backprop:
            return self._differentiable_backward(x, gamma, gys[0])
        x, gamma, gy = x.array, gamma.array, gys[0].array
        xp = backend.get_array_module(x)
        expand, size, count = self._expand, self.comm.size, self._count
        x_hat = x - self._mean[expand]
        x_hat *= self._inv_std[expand]
        sums = xp.empty_like(self._mean, self._dtype, shape=(2, *self._mean.shape))
        sums[0] = _sum(gy * x_hat, self.axis, self._dtype)
        sums[1] = _sum(gy, self.axis, self._dtype)
        ggamma, gbeta = self.comm.add_up(sums)
        gx = x_hat
        gx *= (ggamma / -count)[expand]
        gx -= (gbeta / count)[expand]
        gx += gy
        gx *= (gamma * self._inv_std)[expand]
        return (
            chainer.Variable(gx.astype(x.dtype, copy=False)),
            chainer.Variable(xp.asarray(ggamma / size, gamma.dtype)),
            chainer.Variable(xp.asarray(gbeta / size, gamma.dtype)),
        )

    def _differentiable_backward(
        self, x: chainer.Variable, gamma: chainer.Variable, gy: chainer.Variable
    ) -> tuple[chainer.Variable, ...]:
        """Return the same gradients, computed by functions that can be differentiated again."""
        kept = tuple(1 if i in self.axis else x.shape[i] for i in range(x.ndim))

        def total(v: chainer.Variable) -> chainer.Variable:
            return allreduce(self.comm, F.sum(v, axis=self.axis))

        def spread(v: chainer.Variable) -> chainer.Variable:
            return F.broadcast_to(F.reshape(v, kept), x.shape)

        x_, gamma_, gy_ = (F.cast(v, self._dtype) for v in (x, gamma, gy))
        deviation = x_ - spread(total(x_) / self._count)
        inv_std = (total(deviation * deviation) / self._count + self.eps) ** -0.5
        x_hat = deviation * spread(inv_std)
        ggamma, gbeta = total(gy_ * x_hat), total(gy_)
        shared = (x_hat * spread(ggamma) + spread(gbeta)) / self._count
        gx = spread(gamma_ * inv_std) * (gy_ - shared)
        size = self.comm.size
        return (
            F.cast(gx, x.dtype),
            F.cast(ggamma / size, gamma.dtype),
            F.cast(gbeta / size, gamma.dtype),
        )


def multi_node_batch_normalization(
    x: chainer.Variable,
    gamma: chainer.Variable,
    beta: chainer.Variable,
    comm: CommunicatorBase,
    eps: float = 2e-5,
    running_mean: Any = None,
    running_var: Any = None,
    decay: float = 0.9,
    axis: int | tuple[int, ...] | None = None,
    communication_backend: Backend = "auto",
) -> chainer.Variable:
    """Normalize a batch with the mean and variance over the batches of all ranks.

    Output and running statistics equal those of ``chainer.functions.batch_normalization`` on the
    concatenated batch. Gradients are those of the sum of the losses of all ranks. Only ``gamma``
    and ``beta`` get the mean over the ranks, as from a multi-node optimizer, because every rank
    has a replica of them. Every rank must call the function, and run backward through it.

    Parameters
    ----------
    x : chainer.Variable or ndarray
        Batch of this rank, in float16, float32 or float64. Ranks may have batches of different
        sizes, and some may be empty.
    gamma, beta : chainer.Variable or ndarray
        Scale and offset, with the shape of ``x`` without the axes that are summed over.
    comm : CommunicatorBase
        Communicator of the ranks.
    eps : float
        Number that is added to the variance.
    running_mean, running_var : ndarray, optional
        Moving averages with the shape of ``gamma``, which are updated in place.
    decay : float
        Decay rate of the moving averages.
    axis : int or tuple of int, optional
        Axes to sum over. By default, these are all axes except those of the channels, which
        follow the first axis.
    communication_backend : {'auto', 'mpi', 'nccl'}
        Backend that adds up statistics in GPU memory; by default, that of ``comm``.

    Returns
    -------
    chainer.Variable
        Normalized batch with the shape and dtype of ``x``. Statistics have the dtype of
        ``gamma``, or float32 if that is wider.

    Raises
    ------
    TypeError, ValueError
        On every rank, if dtypes or shapes do not fit on any rank, if ``gamma`` differs in shape
        or dtype between ranks, or if the batch is empty on all ranks. In GPU memory, the ranks
        compare arguments only the first time they use a ``gamma`` of this shape and dtype,
        because comparing makes them wait for each other. Later errors are raised only on the
        rank that has them, which ends the job unless the script catches them.

    Examples
    --------
    >>> x = np.float32([[2 * comm.rank], [2 * comm.rank + 1]])  # 0, 1 and 2, 3
    >>> gamma, beta = np.ones(1, np.float32), np.zeros(1, np.float32)
    >>> y = chainermn.functions.multi_node_batch_normalization(x, gamma, beta, comm)
    >>> y.array.round(2).ravel()  # mean 1.5, variance 1.25
    array([-1.34, -0.45], dtype=float32)
    array([0.45, 1.34], dtype=float32)

    References
    ----------
    Ioffe and Szegedy: Batch Normalization: Accelerating Deep Network Training by Reducing
    Internal Covariate Shift, ICML 2015.
    """
    if get_communication_backend(comm, communication_backend) == "mpi":
        comm = comm.over_mpi
    checked = attempt(lambda: _check(x, gamma, beta, axis))
    error = checked if isinstance(checked, InputError) else None
    comm.agree_to_add_up(getattr(gamma, "array", gamma), error, "multi_node_batch_normalization")
    (x, gamma, beta), axes = checked  # type: ignore[misc]  # an InputError has been raised
    is_last = set(axes) == {0, 2, 3} and is_channels_last(x.array)
    if is_last:
        x, axes = as_stored(x, True), (0, 1, 2)
    node = MultiNodeBatchNormalization(comm, eps, running_mean, running_var, decay, axes)
    return as_shaped(node.apply((x, gamma, beta))[0], is_last)


def _check(
    x: Any, gamma: Any, beta: Any, axis: int | tuple[int, ...] | None
) -> tuple[tuple[chainer.Variable, ...], tuple[int, ...]]:
    inputs = x, gamma, beta = as_variable(x), as_variable(gamma), as_variable(beta)
    if axis is None:
        axis = (0, *range(gamma.ndim + 1, x.ndim))
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    for name, variable in {"x": x, "gamma": gamma, "beta": beta}.items():
        if variable.dtype.kind != "f":
            raise TypeError(f"expected {name} of a float dtype, got {variable.dtype}")
    if not axes or not set(axes) <= set(range(x.ndim)):
        raise ValueError(f"expected axes of x, of shape {x.shape}, got axis={axis}")
    channels = tuple(length for i, length in enumerate(x.shape) if i not in axes)
    if not channels == gamma.shape == beta.shape or gamma.dtype != beta.dtype:
        raise ValueError(
            f"expected gamma and beta of shape {channels} and of one dtype, because x has shape "
            f"{x.shape} and is summed over the axes {axes}; got "
            f"{gamma.dtype}{list(gamma.shape)} and {beta.dtype}{list(beta.shape)}"
        )
    if not chainer.is_arrays_compatible([variable.array for variable in inputs]):
        kinds = ", ".join(str(type(variable.array)) for variable in inputs)
        raise TypeError(f"expected x, gamma and beta in the same memory, got {kinds}")
    return inputs, axes


def _sum(x: Any, axes: tuple[int, ...], dtype: Any) -> Any:
    """Return the sums over some axes.

    If channels are the last axis, CuPy uses few of a GPU's processors. So rows are first added up
    in many groups.
    """
    n_rows = math.prod(x.shape[: len(axes)])
    if len(axes) < 2 or sorted(axes) != list(range(len(axes))) or n_rows == 0:
        return x.sum(axis=axes, dtype=dtype)
    n_groups = _n_groups(n_rows)
    groups = x.reshape(n_groups, n_rows // n_groups, *x.shape[len(axes) :])
    return groups.sum(axis=1, dtype=dtype).sum(axis=0)


@functools.cache
def _n_groups(n_rows: int) -> int:
    """Return the largest divisor up to 1024."""
    return next(n for n in range(1024, 0, -1) if n_rows % n == 0)


def _check_count(count: float) -> None:
    if count == 0:
        raise ValueError("multi_node_batch_normalization: the batch is empty on every rank")
    if count == 1:
        warnings.warn(
            "multi_node_batch_normalization: there is one sample on all ranks together, whose "
            "normalized value is always zero. Is it the last batch of an epoch, or is "
            "chainer.config.train on in evaluation?",
            stacklevel=3,
        )
