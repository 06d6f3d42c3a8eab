"""Gradients exchanged in the background, while the next iteration computes its own."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import chainer

from chainermn.communicators.duplicates import borrow, give_back
from chainermn.failures.activity import waiting_for
from chainermn.gradients.parameters import is_on_gpu
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer, Overlap
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.host.mpi import threads_may_call

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.transport.gpu.device import Gpu
    from chainermn.transport.reducer import Pending


class DoubleBufferingOptimizer(MultiNodeOptimizer):
    """Takes each step on the mean gradient of the iteration before.

    ``update`` of iteration ``k`` waits for the mean of the gradients of iteration ``k - 1``,
    starts the exchange of those of iteration ``k``, and takes a step on the former. So the first
    ``update`` after one that synchronises takes no step, and the last gradients are not used.

    The gradients under way are not part of a snapshot: a resumed run takes one step less.

    Where MPI may not be called from several threads (without ``MPI_THREAD_MULTIPLE``, and with
    Open MPI on several hosts), the results are the same but the exchange does not run in the
    background.
    """

    _exchange: _BackgroundExchange | None
    _buffer: chainer.Link | None

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: CommunicatorBase,
        zero_fill: bool,
        overlap: Overlap = False,
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, overlap)
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

    def _settings(self) -> str:
        return "double_buffering=True"

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
        exchange = self._exchange
        if exchange is None:
            exchange = _BackgroundExchange(self.communicator)
            weakref.finalize(self, exchange.close)
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
        self._loan = borrow(communicator)
        self._executor = None
        if threads_may_call(communicator.inter_size):
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="chainermn-exchange")
        self._stream: Any = None
        self._thread: int | None = None
        self._finish: Callable[[], Any] | None = None
        self._running: Future[None] | None = None

    def start(self, link: chainer.Link, zero_fill: bool) -> None:
        average = functools.partial(
            self._average, link, zero_fill, _device_of(link), chainer.is_debug()
        )
        if is_on_gpu(link):
            gpu = the_gpu()
            self._stream = self._stream or gpu.new_stream()
            # The gradients are complete once the current stream has come to here.
            average = functools.partial(self._average_on_stream, gpu, gpu.record(), average)
        if self._executor is None:
            self._finish = average
        else:
            self._running = self._executor.submit(average)
            self._finish = self._running.result

    def _average(self, link: chainer.Link, zero_fill: bool, device: Any, debug: bool) -> None:
        self._thread = threading.get_ident()
        # Chainer keeps both for each thread.
        with chainer.using_config("debug", debug), chainer.using_device(device):
            self._loan.communicator.multi_node_mean_grad(link, zero_fill)

    def _average_on_stream(self, gpu: Gpu, computed: Pending, average: Callable[[], None]) -> None:
        with gpu.on(self._stream):
            gpu.wait_for(computed)
            average()
            gpu.record().Wait()

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is None:
            return
        if self._executor is None or self._thread is None:
            finish()
            return
        with waiting_for(self._thread):
            finish()

    def close(self) -> None:
        """Give the duplicate back as soon as no exchange is running. Not collective.

        Python may call it wherever it collects garbage, in the midst of ``submit`` for instance:
        so the executor, which ends its thread by itself, must be left alone.
        """
        if self._running is None:
            give_back(self._loan)
        else:
            self._running.add_done_callback(lambda _: give_back(self._loan))


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
