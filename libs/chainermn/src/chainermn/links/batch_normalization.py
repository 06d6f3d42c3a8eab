"""Batch normalization over the batches of all ranks, as a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import chainer
import chainer.links as L

from chainermn.functions.batch_normalization import (
    Backend,
    get_communication_backend,
    multi_node_batch_normalization,
)
from chainermn.links.shared import CommunicatorHolder

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from chainermn.communicators.communicator_base import CommunicatorBase


class MultiNodeBatchNormalization(CommunicatorHolder, L.BatchNormalization):
    """Batch normalization by the mean and variance over the batches of all ranks.

    In training mode, every rank calls it together with the others. The output, the gradients
    and the running statistics are those of ``chainer.links.BatchNormalization`` on the
    concatenated batch; see `chainermn.functions.multi_node_batch_normalization`. With
    ``chainer.config.train`` off it communicates nothing.

    Parameters
    ----------
    size : int, tuple of int or None
        Shape of the channels. None with ``axis``: that of the first input.
    comm : CommunicatorBase
        Shared by copies of the link; an unpickled link has none until ``link.comm = ...``.
    decay : float
        Of the moving averages.
    eps : float
        Added to the variance.
    dtype : dtype, optional
        Of parameters and statistics; ``chainer.config.dtype`` by default, float32 for mixed16.
    use_gamma, use_beta : bool
        Whether there is a scale, an offset.
    initial_gamma, initial_beta : initializer, optional
        1 and 0 by default.
    communication_backend : {'auto', 'mpi', 'nccl'}
        What statistics in GPU memory travel by; by default what the communicator uses.
    axis : int or tuple of int, optional
        Axes to sum over; the first and those behind the channels by default.
    initial_avg_mean, initial_avg_var : initializer, optional
        0 and 1 by default.

    Attributes
    ----------
    gamma, beta : chainer.Parameter or None
    avg_mean, avg_var : ndarray
        Moving averages, used where ``chainer.config.train`` is off.
    N : int
        Number of batches seen in fine-tuning.

    Raises
    ------
    ValueError
        On every rank, if there is no such ``communication_backend``.
    RuntimeError
        If neither ``size`` nor ``axis`` is given.
    """

    _communication_backend: Backend = "auto"

    def __init__(
        self,
        size: int | tuple[int, ...] | None,
        comm: CommunicatorBase,
        decay: float = 0.9,
        eps: float = 2e-5,
        dtype: DTypeLike | None = None,
        use_gamma: bool = True,
        use_beta: bool = True,
        initial_gamma: Any = None,
        initial_beta: Any = None,
        communication_backend: Backend = "auto",
        axis: int | tuple[int, ...] | None = None,
        initial_avg_mean: Any = None,
        initial_avg_var: Any = None,
    ) -> None:
        get_communication_backend(comm, communication_backend)
        super().__init__(
            size,
            decay,
            eps,
            dtype,
            use_gamma,
            use_beta,
            initial_gamma,
            initial_beta,
            axis,
            initial_avg_mean,
            initial_avg_var,
        )
        self.comm = comm
        self._communication_backend = communication_backend

    def forward(self, x: chainer.Variable, finetune: bool = False) -> chainer.Variable:
        """Normalize a batch.

        Parameters
        ----------
        x : chainer.Variable or ndarray
            Batches may differ in size from rank to rank.
        finetune : bool
            Make the moving averages the plain averages over all batches since
            ``start_finetuning()``.
        """
        if not chainer.config.train:
            return super().forward(x)
        if self.avg_mean is None:
            self._initialize_params(
                tuple(length for i, length in enumerate(x.shape) if i not in self.axis)
            )
        gamma, beta = self.gamma, self.beta
        if gamma is None:
            gamma = self.xp.ones(self.avg_mean.shape, self._highprec_dtype)
        if beta is None:
            beta = self.xp.zeros(self.avg_mean.shape, self._highprec_dtype)

        statistics, decay = (self.avg_mean, self.avg_var), self.decay
        if chainer.config.in_recomputing:
            statistics = (None, None)
        elif finetune:
            self.N += 1
            decay = 1 - 1 / self.N
        return multi_node_batch_normalization(
            *(x, gamma, beta, self.comm, self.eps, *statistics, decay, self.axis),
            communication_backend=self._communication_backend,
        )
