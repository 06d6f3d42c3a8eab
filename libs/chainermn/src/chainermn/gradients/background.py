"""The exchange in a background thread, while the next iteration computes its gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import chainer

from chainermn.failures.activity import waiting_for
from chainermn.gradients.parameters import is_on_gpu
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.gpu.nccl_turns import Turn
from chainermn.transport.host.mpi import thread_support

if TYPE_CHECKING:
    from chainermn.gradients.exchange import GradientExchange


class BackgroundExchange:
    """Averages the gradients of a model in a thread. Making one is collective.

    If several threads may not call MPI at the same time, `wait` averages them instead.
    ``exchange`` is duplicated, and stays free for other use.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._original = exchange
        self._duplicate = exchange.duplicate()
        self._executor = None
        if thread_support(exchange.topology.inter_size) == "multiple":
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="chainermn-exchange")
        self._stream: Any = None
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
            # The gradients are complete once the current stream has reached this point.
            computed = gpu.record()
        # Without a thread, there is only the turn of the script itself.
        turn = Turn() if gpu is not None and self._executor is not None else nullcontext()

        def average() -> None:
            self._thread = threading.get_ident()
            # Chainer keeps both settings per thread.
            with chainer.using_config("debug", debug), chainer.using_device(device):
                if gpu is None:
                    exchange.mean(model, zero_fill)
                    return
                with turn, gpu.on(self._stream):
                    gpu.wait_for(computed)
                    exchange.mean(model, zero_fill)
                    gpu.record().Wait()

        if self._executor is None:
            self._finish = average
        else:
            self._running = self._executor.submit(average)
            self._finish = self._running.result

    def wait(self) -> None:
        """Wait until no exchange is running, and raise the error if it failed.

        Raises
        ------
        Exception
            On every rank; see `CommunicatorBase.multi_node_mean_grad`.
        """
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

        Python's garbage collector may call this anywhere, even inside ``submit``. So this does not
        shut down the executor, which ends its thread by itself.
        """
        if self._running is None:
            self._duplicate.give_back()
        else:
            self._running.add_done_callback(lambda _: self._duplicate.give_back())


def _device_of(link: chainer.Link) -> Any:
    return next((p.device for p in link.params(False)), chainer.get_device("@numpy"))
