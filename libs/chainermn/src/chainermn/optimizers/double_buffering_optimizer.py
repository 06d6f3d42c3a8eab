"""Gradients exchanged in the background, while the next iteration computes its own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Self

import chainer

from chainermn import spans
from chainermn.channels_last import is_channels_last, lay_out
from chainermn.gradients.background import BackgroundExchange
from chainermn.optimizers.exchanges import background_exchange, exchange_of
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer

if TYPE_CHECKING:
    from chainermn.gradients.step import Step
    from chainermn.optimizers.pending import PendingGradients


class DoubleBufferingOptimizer(MultiNodeOptimizer):
    """Takes each step on the mean gradients of the previous iteration.

    ``create_multi_node_optimizer(..., double_buffering=True)`` returns it. In iteration ``k``,
    ``update`` waits for the mean gradients of iteration ``k - 1``, starts to exchange those of
    iteration ``k``, and takes a step on the means. So the first ``update`` on equal parameters
    takes no step, and the last gradients are never used.

    A snapshot does not contain the gradients that are being exchanged, so a resumed run takes one
    step fewer.

    If several threads may not call MPI at the same time (without ``MPI_THREAD_MULTIPLE``, or with
    Open MPI on several hosts), results are the same, but the exchange does not run in the
    background.

    Examples
    --------
    >>> optimizer = chainer.optimizers.SGD()
    >>> optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, double_buffering=True)
    >>> optimizer = optimizer.setup(model)
    >>> for _ in range(3):  # gives all ranks equal parameters; starts an exchange; takes a step
    ...     optimizer.update(model, np.ones((4, 2), np.float32), np.zeros(4, np.int32))
    >>> optimizer.wait()
    >>> optimizer.t
    1
    """

    _background: BackgroundExchange | None = None
    _buffer: chainer.Link | None = None
    _has_means = False

    def setup(self, link: chainer.Link) -> Self:
        """Set the model whose parameters are optimized, and return this optimizer."""
        self._drop()
        return super().setup(link)

    def wait(self) -> None:
        """Wait until no exchange is running. Every rank must call it.

        Raises
        ------
        Exception
            On every rank, for the reasons of `MultiNodeOptimizer.update`.
        """
        if self._background is not None:
            self._background.wait()

    def _exchange_of_recorded_steps(self) -> str:
        return "double_buffering=True"

    def _settings(self) -> str:
        return "double_buffering=True" + self._further_settings()

    def _after_restoring(self, restored: PendingGradients | None) -> bool:
        # The gradients that are being exchanged belong to the parameters before loading.
        self._drop()
        return super()._after_restoring(restored)

    def _synchronize(self, everything: bool) -> None:
        self._drop()
        super()._synchronize(everything)

    def _average(self, step: Step) -> Step:
        step = exchange_of(self.communicator).agree(step)
        if step.pauses:
            return step
        target = self.actual_optimizer.target
        self._has_means = self._buffer is not None
        if self._buffer is None:
            # Has the arrays of the parameters, but its own gradients.
            self._buffer = target.copy(mode="share")
        if self._background is None:
            self._background = BackgroundExchange(background_exchange(self.communicator))
            weakref.finalize(self, self._background.close)
        with spans.span("wait for the exchange"):
            self._background.wait()
        _swap_gradients(target, self._buffer)
        self._background.start(self._buffer, self.zero_fill)
        return step

    def _take_step(self) -> None:
        if self._has_means:
            super()._take_step()

    def _drop(self) -> None:
        """Forget the gradients that are being exchanged."""
        self.wait()
        self._buffer = None


def _swap_gradients(one: chainer.Link, other: chainer.Link) -> None:
    # A parameter with two names must not be swapped back.
    pairs = {id(p): (p, twin) for p, twin in zip(one.params(), other.params(), strict=True)}
    for parameter, twin in pairs.values():
        if parameter.array is None:
            continue
        if is_channels_last(twin.array):  # ranks have agreed on it
            lay_out(parameter)
        # Until the next swap, the exchange and the script may lay out one of them, but not both.
        twin._data = [parameter.array]
        gradient = parameter.grad
        # Twins have equal shapes and dtypes, and checking that takes time.
        parameter._set_grad_without_check(twin.grad)
        twin._set_grad_without_check(gradient)
        # Steps divide by the loss scale with which the gradient was computed.
        parameter._loss_scale, twin._loss_scale = twin._loss_scale, parameter._loss_scale
