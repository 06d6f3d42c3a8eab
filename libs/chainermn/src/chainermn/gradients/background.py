"""Exchange gradients in a background thread while the next iteration computes its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import chainer

from chainermn.failures.activity import waiting_for
from chainermn.gradients.bucket import flat_gradients
from chainermn.gradients.parameters import (
    fill_missing_gradients,
    initialized_parameters,
    is_on_gpu,
)
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.gpu.nccl_turns import Turn
from chainermn.transport.host.mpi import thread_support
from chainermn.transport.reducer import Array, Pending

if TYPE_CHECKING:
    from chainermn.gradients.exchange import GradientExchange


class BackgroundExchange:
    """Averages the gradients of a model in a thread. Creating one is collective.

    If MPI does not allow several threads to call it at the same time, `wait` averages the
    gradients instead. This duplicates ``exchange``, which stays free for other uses. Gradients in
    GPU memory are averaged on a separate stream.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._original = exchange
        self._duplicate = exchange.duplicate()
        self._executor = None
        if thread_support(exchange.topology.inter_size) == "multiple":
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="chainermn-exchange")
        self._stream: Any = None
        self._gradients: Sequence[Array] = ()
        self._averaged: Pending | None = None
        self._thread: int | None = None
        self._finish: Callable[[], Any] | None = None
        self._running: Future[None] | None = None

    def start(self, model: chainer.Link, zero_fill: bool) -> None:
        """Start replacing every gradient of ``model`` with its mean; see `GradientExchange.mean`.

        Do not use the gradients until `wait` returns.
        """
        exchange = self._duplicate.made
        self._original.has_averaged = True  # here, as the thread is not as far on every rank
        exchange.wire_dtype = self._original.wire_dtype
        debug, device = chainer.is_debug(), _device_of(model)
        gpu = the_gpu() if is_on_gpu(model) else None
        if gpu is not None:
            self._stream = self._stream or gpu.new_stream()
            # CuPy reuses freed memory for later work on the stream where it was allocated, which
            # does not wait for other streams. So allocate and free the model's arrays here,
            # even those that the exchange replaces.
            parameters = initialized_parameters(model).values()
            if zero_fill:
                fill_missing_gradients(parameters)
            self._gradients = flat_gradients([p for p in parameters if p.grad is not None])
            # The gradients are complete once the current stream has reached this point.
            computed = gpu.record()

        def average() -> None:
            self._thread = threading.get_ident()
            # Chainer keeps both settings per thread.
            with chainer.using_config("debug", debug), chainer.using_device(device):
                if gpu is None:
                    exchange.mean(model, zero_fill)
                    return
                with gpu.on(self._stream):
                    gpu.wait_for(computed)
                    try:
                        exchange.mean(model, zero_fill)
                    finally:
                        self._averaged = gpu.record()

        if self._executor is None:
            self._finish = average
            return
        turn = None if gpu is None else Turn()
        if turn is not None:
            self._executor.submit(turn.begin)
        self._running = self._executor.submit(average)
        self._finish = self._running.result
        if turn is not None:
            self._running = self._executor.submit(self._wait_for_gpu, turn)

    def wait(self) -> None:
        """Wait until no exchange is running, and raise its error if it failed.

        For gradients in GPU memory, the current stream waits for the means, but not the host.

        Raises
        ------
        Exception
            If the exchange failed, on every rank; see `CommunicatorBase.multi_node_mean_grad`.
        """
        finish, self._finish = self._finish, None
        if finish is None:
            return
        thread = None if self._executor is None else self._thread
        try:
            with nullcontext() if thread is None else waiting_for(thread):
                finish()
        finally:
            if self._averaged is not None:
                the_gpu().wait_for(self._averaged)

    def close(self) -> None:
        """Give the duplicate back as soon as no exchange is running. Not collective.

        Python's garbage collector may call this anywhere, even inside ``submit``. So this does not
        shut down the executor, which ends its own thread.
        """
        if self._running is None:
            self._duplicate.give_back()
        else:
            self._running.add_done_callback(lambda _: self._duplicate.give_back())

    def _wait_for_gpu(self, turn: Turn) -> None:
        try:
            if self._averaged is not None:
                self._averaged.Wait()
        finally:
            turn.end()


def _device_of(link: chainer.Link) -> Any:
    return next((p.device for p in link.params(False)), chainer.get_device("@numpy"))
