"""The exchange in a background thread, while the next iteration computes its gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import chainer

from chainermn.failures.activity import waiting_for
from chainermn.gradients.buckets import flat_gradients
from chainermn.gradients.parameters import (
    fill_missing_gradients,
    initialised_parameters,
    is_on_gpu,
)
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.gpu.nccl_turns import Turn
from chainermn.transport.host.mpi import thread_support
from chainermn.transport.reducer import Pending

if TYPE_CHECKING:
    from chainermn.gradients.exchange import GradientExchange


class BackgroundExchange:
    """Averages the gradients of a model in a thread. Making one is collective.

    If several threads may not call MPI at the same time, `wait` averages them instead.
    ``exchange`` is duplicated, and stays free for other use. Gradients in GPU memory are averaged
    on a separate stream.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._original = exchange
        self._duplicate = exchange.duplicate()
        self._executor = None
        if thread_support(exchange.topology.inter_size) == "multiple":
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="chainermn-exchange")
        self._stream: Any = None
        self._averaged: Pending | None = None
        self._thread: int | None = None
        self._finish: Callable[[], Any] | None = None
        self._running: Future[None] | None = None

    def start(self, model: chainer.Link, zero_fill: bool) -> None:
        """Begin to replace every gradient of ``model`` by its mean; see `GradientExchange.mean`.

        The gradients must not be used until `wait` returns.
        """
        exchange = self._duplicate.made
        exchange.wire_dtype = self._original.wire_dtype
        debug, device = chainer.is_debug(), _device_of(model)
        gpu = the_gpu() if is_on_gpu(model) else None
        if gpu is not None:
            self._stream = self._stream or gpu.new_stream()
            # CuPy gives freed memory to later work of the stream on which it was allocated, which
            # waits for no other stream. So what belongs to the model is made and freed here.
            parameters = initialised_parameters(model).values()
            if zero_fill:
                fill_missing_gradients(parameters)
            flat_gradients([p for p in parameters if p.grad is not None])
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
        """Wait until no exchange is running, and raise the error if it failed.

        In GPU memory the current stream waits for the means, not the host.

        Raises
        ------
        Exception
            On every rank; see `CommunicatorBase.multi_node_mean_grad`.
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
        shut down the executor, which ends its thread by itself.
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
