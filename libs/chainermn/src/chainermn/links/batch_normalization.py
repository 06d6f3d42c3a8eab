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
    """Batch normalization with the mean and variance over the batches of all ranks.

    Use it instead of ``chainer.links.BatchNormalization`` if the batch of a single rank is too
    small for good statistics. Output, gradients and running statistics equal those of Chainer's
    link on the concatenated batch; see `chainermn.functions.multi_node_batch_normalization`.
    During training, every rank must call it, and batches may differ in size. In test mode, it
    does not communicate.

    Parameters
    ----------
    size, decay, eps, dtype, use_gamma, use_beta, initial_gamma, initial_beta, axis, \
    initial_avg_mean, initial_avg_var
        The parameters of ``chainer.links.BatchNormalization``.
    comm : CommunicatorBase
        Communicator of the ranks; copies of the link share it. After unpickling a link, set its
        attribute ``comm``.
    communication_backend : {'auto', 'mpi', 'nccl'}
        Backend that adds up statistics in GPU memory; by default, that of ``comm``.

    Raises
    ------
    ValueError
        If ``communication_backend`` is unknown, or ``comm`` does not have it.
    RuntimeError
        If neither ``size`` nor ``axis`` is given.

    Examples
    --------
    >>> link = chainermn.links.MultiNodeBatchNormalization(1, comm)
    >>> y = link(np.float32([[2 * comm.rank], [2 * comm.rank + 1]]))  # 0, 1 and 2, 3
    >>> y.array.round(2).ravel()  # mean 1.5, variance 1.25
    array([-1.34, -0.45], dtype=float32)
    array([0.45, 1.34], dtype=float32)
    """

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

        With ``finetune``, the running statistics are plain averages over all batches since
        ``start_finetuning()``, instead of moving averages.
        """
        if not chainer.config.train:
            return super().forward(x)
        if self.avg_mean is None:
            self._initialize_params(
                tuple(length for i, length in enumerate(x.shape) if i not in self.axis)
            )
        gamma = self._get_gamma()[0] if self.gamma is None else self.gamma
        beta = self._get_beta()[0] if self.beta is None else self.beta
        mean, var, decay = self.avg_mean, self.avg_var, self.decay
        if chainer.config.in_recomputing:
            mean = var = None
        elif finetune:
            self.N += 1
            decay = 1 - 1 / self.N
        return multi_node_batch_normalization(
            x,
            gamma,
            beta,
            self.comm,
            eps=self.eps,
            running_mean=mean,
            running_var=var,
            decay=decay,
            axis=self.axis,
            communication_backend=self._communication_backend,
        )
