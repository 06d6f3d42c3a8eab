"""Gradients exchanged while backward still computes others."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import chainer

from chainermn.communicators.transport.gpu import on_gpu
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer, Overlap

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.communicators.overlapped_exchange import OverlappedExchange


class OverlappingOptimizer(MultiNodeOptimizer):
    """Hides the exchange behind backward; its steps are those of `MultiNodeOptimizer`.

    `chainermn.communicators.overlapped_exchange` tells how. Where the communicator cannot do
    that, the exchange follows backward.
    """

    _exchange: OverlappedExchange | None
    _is_possible: bool

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: CommunicatorBase,
        zero_fill: bool,
        overlap: Overlap = True,
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, overlap)
        self._set_own(_exchange=None, _is_possible=True)

    def backward(self, loss: chainer.Variable) -> None:
        """Run ``loss.backward()`` and begin to exchange: see `MultiNodeOptimizer.backward`."""
        if self._exchange is None:
            super().backward(loss)
            return
        actual = self.actual_optimizer
        self._exchange.backward(loss, actual._loss_scale, actual.target, self.zero_fill)

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
        self._set_own(_exchange=exchange)
        weakref.finalize(self, exchange.close)

    def _is_on_gpu_anywhere(self) -> bool:
        parameters = self.actual_optimizer.target.params()
        is_on_gpu = any(on_gpu(parameter.array) for parameter in parameters)
        (is_anywhere,) = self.communicator._any_of_each([is_on_gpu], "update")
        return bool(is_anywhere)

    def _step(self) -> None:
        if self._exchange is None:
            super()._step()
            return
        self._exchange.mean(self.actual_optimizer.target, self.zero_fill)
        self.actual_optimizer.update(None)
