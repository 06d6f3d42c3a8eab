"""Gradients exchanged while backward still computes others."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from chainermn.gradients.overlap.trial import OverlapTrial
from chainermn.gradients.parameters import is_on_gpu
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer, Overlap

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.gradients.overlap.exchange import OverlappedExchange


class OverlappingOptimizer(MultiNodeOptimizer):
    """Hides the exchange behind backward; its steps are those of `MultiNodeOptimizer`.

    `chainermn.gradients.overlap.exchange` tells how. Where the communicator cannot do
    that, or with ``overlap='auto'`` does not gain by it, the exchange follows backward.
    """

    _exchange: OverlappedExchange | None
    _is_possible: bool
    _trial: OverlapTrial | None
    _close: Any

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: CommunicatorBase,
        zero_fill: bool,
        overlap: Overlap = True,
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, overlap)
        self._set_own(_exchange=None, _is_possible=True, _trial=None, _close=None)

    def backward(self, loss: chainer.Variable) -> None:
        """Run ``loss.backward()`` and begin to exchange: see `MultiNodeOptimizer.backward`."""
        actual, exchange = self.actual_optimizer, self._exchange_in_use()
        with self._timed():
            if exchange is None:
                super().backward(loss)
            else:
                exchange.backward(loss, actual._loss_scale, actual.target, self.zero_fill)

    def _exchange_in_use(self) -> OverlappedExchange | None:
        return None if self._trial is not None and not self._trial.overlaps else self._exchange

    def _timed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._trial is None else self._trial.timed()

    def _agree_on_settings(self) -> None:
        super()._agree_on_settings()
        if self._exchange is not None:
            self._exchange.drop()
        elif self._is_possible:
            self._create_exchange()

    def _create_exchange(self) -> None:
        if self._overlap == "auto" and self._is_on_gpu_anywhere():
            # Where it pays there has not been measured.
            return
        try:
            exchange = self.communicator.create_overlapped_exchange()
        except RuntimeError as error:
            self._set_own(_is_possible=False)
            if self._overlap is True and self.communicator.rank == 0:
                warnings.warn(f"overlap=True has no effect: {error}", stacklevel=6)
            return
        trial = OverlapTrial() if self._overlap == "auto" else None
        close = weakref.finalize(self, exchange.close)
        self._set_own(_exchange=exchange, _trial=trial, _close=close)

    def _is_on_gpu_anywhere(self) -> bool:
        return any(self.communicator.allgather_obj(is_on_gpu(self.actual_optimizer.target)))

    def _step_unless(self, *flags: bool) -> Sequence[bool]:
        found = super()._step_unless(*flags)
        if self._trial is not None and not any(found):
            self._trial.end_iteration()
            if self._trial.is_over:
                self._decide(*self._trial.medians)
        return found

    def _mean_unless(self, flags: Sequence[bool]) -> Sequence[bool]:
        exchange = self._exchange_in_use()
        with self._timed():
            if exchange is None:
                return super()._mean_unless(flags)
            return exchange.mean(self.actual_optimizer.target, self.zero_fill, flags)

    def _decide(self, with_overlap: float, without: float) -> None:
        """Keep what is faster, measured by the slowest rank. Collective."""
        slowest: Any = self.communicator.allreduce(np.array([with_overlap, without]), "max")
        self._set_own(_trial=None)
        if slowest[1] < slowest[0]:
            self._close()
            self._set_own(_exchange=None, _is_possible=False)
