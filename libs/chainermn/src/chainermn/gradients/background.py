"""The exchange in a background thread, while the next iteration computes its gradients."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import chainer

from chainermn.failures.activity import waiting_for
from chainermn.gradients.parameters import is_on_gpu
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.host.mpi import threads_may_call

if TYPE_CHECKING:
    import numpy as np

    from chainermn.gradients.exchange import GradientExchange
    from chainermn.transport.gpu.device import Gpu
    from chainermn.transport.reducer import Pending


class BackgroundExchange:
    """Averages the gradients of a model in a thread. Making one is collective.

    If several threads may not call MPI, `wait` averages them instead.

    Parameters
    ----------
    exchange : GradientExchange
        Exchange to duplicate. The original stays free for other use.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._original = exchange
        self._duplicate = exchange.duplicate()
        self._executor = None
        if threads_may_call(exchange.topology.inter_size):
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="chainermn-exchange")
        self._stream: Any = None
        self._thread: int | None = None
        self._finish: Callable[[], Any] | None = None
        self._running: Future[None] | None = None

    def start(self, model: chainer.Link, zero_fill: bool) -> None:
        """Begin to replace every gradient of ``model`` by its mean. Call `wait` afterwards.

        Parameters
        ----------
        model : chainer.Link
            Model whose gradients must not be used until `wait` returns.
        zero_fill : bool
            See `CommunicatorBase.multi_node_mean_grad`.
        """
        average = functools.partial(
            self._average,
            model,
            zero_fill,
            self._original.wire_dtype,
            _device_of(model),
            chainer.is_debug(),
        )
        if is_on_gpu(model):
            gpu = the_gpu()
            self._stream = self._stream or gpu.new_stream()
            # The gradients are complete once the current stream has reached this point.
            average = functools.partial(self._average_on_stream, gpu, gpu.record(), average)
        if self._executor is None:
            self._finish = average
        else:
            self._running = self._executor.submit(average)
            self._finish = self._running.result

    def _average(
        self,
        model: chainer.Link,
        zero_fill: bool,
        wire_dtype: np.dtype[Any] | None,
        device: Any,
        debug: bool,
    ) -> None:
        self._thread = threading.get_ident()
        exchange = self._duplicate.made
        exchange.wire_dtype = wire_dtype
        # Chainer keeps both settings per thread.
        with chainer.using_config("debug", debug), chainer.using_device(device):
            exchange.mean(model, zero_fill)

    def _average_on_stream(self, gpu: Gpu, computed: Pending, average: Callable[[], None]) -> None:
        with gpu.on(self._stream):
            gpu.wait_for(computed)
            average()
            gpu.record().Wait()

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
    arrays = (p for p in link.params() if p.array is not None)
    return next((p.device for p in arrays), chainer.get_device("@numpy"))
