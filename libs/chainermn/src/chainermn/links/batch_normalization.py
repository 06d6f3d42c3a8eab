"""Normalize batches over all ranks, as a link."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.links as L
from numpy.typing import DTypeLike

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions.batch_normalization import (
    Backend,
    get_communication_backend,
    multi_node_batch_normalization,
)
from chainermn.links.shared import CommunicatorHolder


class MultiNodeBatchNormalization(CommunicatorHolder, L.BatchNormalization):
    """Batch normalization by the mean and variance over the batches of all ranks.

    In training mode, all ranks must call it together. Output, gradients and running statistics
    equal those of ``chainer.links.BatchNormalization`` on the concatenated batch; see
    `chainermn.functions.multi_node_batch_normalization`. In test mode, it does not communicate.

    Parameters
    ----------
    size : int, tuple of int or None
        Shape of the channels. If None, ``axis`` must be given, and the first input decides.
    comm : CommunicatorBase
        Shared by copies of the link. After unpickling, set it by ``link.comm = ...``.
    decay : float
        Decay rate of the moving averages.
    eps : float
        Added to the variance.
    dtype : dtype, optional
        Dtype of parameters and statistics; by default ``chainer.config.dtype``, with float32 in
        place of mixed16.
    use_gamma, use_beta : bool
        Whether to scale, and to add an offset.
    initial_gamma, initial_beta : initializer, optional
        Initial scale and offset; 1 and 0 by default.
    communication_backend : {'auto', 'mpi', 'nccl'}
        Backend that reduces statistics in GPU memory; by default, that of ``comm``.
    axis : int or tuple of int, optional
        Axes to sum over; by default, all except those of the channels, which follow the first.
    initial_avg_mean, initial_avg_var : initializer, optional
        Initial moving averages; 0 and 1 by default.

    Attributes
    ----------
    gamma, beta : chainer.Parameter or None
    avg_mean, avg_var : ndarray
        Moving averages, used in test mode.
    N : int
        Number of batches seen in fine-tuning.

    Raises
    ------
    ValueError
        If ``communication_backend`` is unknown, or ``comm`` does not have it.
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
            Batches of different ranks may differ in size.
        finetune : bool
            Replace the moving averages by plain averages over all batches since
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
