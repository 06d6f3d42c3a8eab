"""Gradients exchanged in the background, while the next iteration computes its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import chainer
from chainer.backends import cuda

from chainermn.communicators.transport.mpi import load_mpi
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase


class DoubleBufferingOptimizer(MultiNodeOptimizer):
    """Takes each step on the mean gradient of the iteration before.

    ``update`` of iteration ``k`` waits for the mean of the gradients of iteration ``k - 1``,
    starts the exchange of those of iteration ``k``, and takes a step on the former. So the first
    ``update`` after one that synchronises takes no step, and the last gradients are not used.

    The gradients under way are not part of a snapshot: a resumed run takes one step less.

    Where MPI may not be called from several threads (``MPI_THREAD_MULTIPLE``), the results are
    the same but the exchange does not run in the background.
    """

    _exchange: _BackgroundExchange | None
    _buffer: chainer.Link | None

    def __init__(
        self, actual_optimizer: chainer.Optimizer, communicator: CommunicatorBase, zero_fill: bool
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill)
        self._set_own(_exchange=None, _buffer=None)

    def setup(self, link: chainer.Link) -> Self:
        """Set the link whose parameters are optimized, and return this optimizer."""
        self._drop()
        return super().setup(link)

    def wait(self) -> None:
        """Wait until no exchange is running. Every rank must call it.

        Raises
        ------
        Exception
            What the exchange raised: on every rank, as `MultiNodeOptimizer.update` does.
        """
        if self._exchange is not None:
            self._exchange.wait()

    def _after_restoring(self) -> None:
        # Gradients under way belong to the parameters from before the loading.
        self._drop()

    def _synchronise(self) -> None:
        self._drop()
        super()._synchronise()

    def _step(self) -> None:
        target, buffer = self.actual_optimizer.target, self._buffer
        is_first = buffer is None
        if buffer is None:
            # Shares the arrays of the parameters, but has gradients of its own.
            buffer = target.copy(mode="share")
        exchange = self._exchange or _BackgroundExchange(self.communicator)
        self._set_own(_exchange=exchange, _buffer=buffer)
        exchange.wait()
        _swap_gradients(target, buffer)
        exchange.start(buffer, self.zero_fill)
        if not is_first:
            self.actual_optimizer.update(None)

    def _drop(self) -> None:
        """Forget the gradients that are being exchanged."""
        self.wait()
        self._set_own(_buffer=None)


class _BackgroundExchange:
    """Averages the gradients of a link in a thread.

    Parameters
    ----------
    communicator : CommunicatorBase
        Stays free for other use: the exchange has a duplicate.
    """

    def __init__(self, communicator: CommunicatorBase) -> None:
        mpi = load_mpi()
        self._communicator = communicator.split(0, communicator.rank)
        self._executor = None
        if mpi.Query_thread() >= mpi.THREAD_MULTIPLE:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="chainermn-exchange")
        self._finish: Callable[[], Any] | None = None

    def start(self, link: chainer.Link, zero_fill: bool) -> None:
        device = _device_of(link)
        # The gradients are complete on the GPU once its current stream has come to here.
        event = cuda.Event() if device.xp is cuda.cupy else None
        if event is not None:
            event.record()

        debug = chainer.is_debug()  # which belongs to a thread

        def average() -> None:
            with chainer.using_config("debug", debug), chainer.using_device(device):
                if event is None:
                    self._communicator.multi_node_mean_grad(link, zero_fill)
                    return
                with cuda.Stream(non_blocking=True) as stream:
                    stream.wait_event(event)
                    self._communicator.multi_node_mean_grad(link, zero_fill)
                    stream.synchronize()

        self._finish = self._executor.submit(average).result if self._executor else average

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def _swap_gradients(one: chainer.Link, other: chainer.Link) -> None:
    twins = dict(other.namedparams())
    # A parameter that has two names must not be swapped back.
    parameters = {id(parameter): (name, parameter) for name, parameter in one.namedparams()}
    for name, parameter in parameters.values():
        twin = twins[name]
        if parameter.array is None:
            continue
        parameter.grad, twin.grad = twin.grad, parameter.grad
        # Steps divide by the loss scale with which the gradient was computed.
        parameter._loss_scale, twin._loss_scale = twin._loss_scale, parameter._loss_scale


def _device_of(link: chainer.Link) -> Any:
    arrays = (p for p in link.params() if p.array is not None)
    return next((p.device for p in arrays), chainer.get_device("@numpy"))
