"""Gradients exchanged in the background, while the next iteration computes its own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import chainer

from chainermn import spans
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer

if TYPE_CHECKING:
    from chainermn.gradients.background import BackgroundExchange
    from chainermn.optimizers.unsent import Unsent


class DoubleBufferingOptimizer(MultiNodeOptimizer):
    """Takes each step on the mean gradient of the iteration before.

    ``update`` of iteration ``k`` waits for the mean gradients of iteration ``k - 1``, starts to
    exchange the gradients of iteration ``k``, and takes a step on those means. So the first
    ``update`` after one that synchronises takes no step, and the last gradients are not used.

    A snapshot does not contain the gradients under way: a resumed run takes one step less.

    If several threads may not call MPI at the same time (without ``MPI_THREAD_MULTIPLE``, and with
    Open MPI on several hosts), the results are the same, but the exchange does not run in the
    background.
    """

    _exchange: BackgroundExchange | None = None
    _buffer: chainer.Link | None = None

    def setup(self, link: chainer.Link) -> Self:
        """Set the link whose parameters are optimized, and return this optimizer."""
        self._drop()
        return super().setup(link)

    def wait(self) -> None:
        """Wait until no exchange is running. Every rank must call it.

        Raises
        ------
        Exception
            On every rank, the errors of `MultiNodeOptimizer.update`.
        """
        if self._exchange is not None:
            self._exchange.wait()

    def _settings(self) -> str:
        return "double_buffering=True" + self._further_settings()

    def _after_restoring(self, restored: Unsent | None) -> bool:
        # Gradients under way belong to the parameters from before the loading.
        self._drop()
        return super()._after_restoring(restored)

    def _synchronise(self) -> None:
        self._drop()
        super()._synchronise()

    def _step_unless(self, *flags: bool) -> Sequence[bool]:
        found = self.communicator.any_of_each(flags) if flags else ()
        if any(found):
            return found
        target, is_first = self.actual_optimizer.target, self._buffer is None
        if self._buffer is None:
            # Shares the arrays of the parameters, but has gradients of its own.
            self._buffer = target.copy(mode="share")
        if self._exchange is None:
            self._exchange = self.communicator.create_background_exchange()
            weakref.finalize(self, self._exchange.close)
        with spans.span("wait for the exchange"):
            self._exchange.wait()
        _swap_gradients(target, self._buffer)
        self._exchange.start(self._buffer, self.zero_fill)
        if not is_first:
            self._take_step()
        return found

    def _drop(self) -> None:
        """Forget the gradients that are being exchanged."""
        self.wait()
        self._buffer = None


def _swap_gradients(one: chainer.Link, other: chainer.Link) -> None:
    # A parameter that has two names must not be swapped back.
    pairs = {id(p): (p, twin) for p, twin in zip(one.params(), other.params(), strict=True)}
    for parameter, twin in pairs.values():
        if parameter.array is None:
            continue
        gradient = parameter.grad
        # Twins have equal shapes and dtypes, and checking that takes time.
        parameter._set_grad_without_check(twin.grad)
        twin._set_grad_without_check(gradient)
        # Steps divide by the loss scale with which the gradient was computed.
        parameter._loss_scale, twin._loss_scale = twin._loss_scale, parameter._loss_scale
