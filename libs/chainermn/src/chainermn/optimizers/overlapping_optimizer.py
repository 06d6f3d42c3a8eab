"""Exchange gradients while backward still computes others."""

from __future__ import annotations

import statistics
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from chainermn.gradients.parameters import is_on_gpu
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer

if TYPE_CHECKING:
    from chainermn.gradients.overlap.exchange import OverlappedExchange

# Not measured, because they learn the order of gradients and touch memory for the first time.
_ITERATIONS_BEFORE = 3
_ITERATIONS_EACH = 7


class OverlappingOptimizer(MultiNodeOptimizer):
    """Overlaps the exchange with backward; its steps are those of `MultiNodeOptimizer`.

    See `chainermn.gradients.overlap.exchange`. If the communicator does not support that, or if
    ``overlap='auto'`` finds it slower, the exchange follows backward.
    """

    _is_possible = True
    _exchange: OverlappedExchange | None = None
    _trial: _Trial | None = None
    _close: Any = None

    def backward(self, loss: chainer.Variable) -> None:
        """Run ``loss.backward()`` and start the exchange; see `MultiNodeOptimizer.backward`."""
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
            # 'auto' is not measured yet on GPUs.
            return
        create, compressor = self.communicator.create_overlapped_exchange, self._compressor
        try:
            # Users' communicators may lack this parameter.
            exchange = create() if compressor is None else create(compressor)
        except RuntimeError as error:
            self._is_possible = False
            if self._overlap is True and self.communicator.rank == 0:
                warnings.warn(f"overlap=True has no effect: {error}", stacklevel=6)
            return
        self._exchange = exchange
        self._close = weakref.finalize(self, exchange.close)
        self._trial = _Trial() if self._overlap == "auto" else None

    def _is_on_gpu_anywhere(self) -> bool:
        return any(self.communicator.allgather_obj(is_on_gpu(self.actual_optimizer.target)))

    def _step_unless(self, *flags: bool) -> Sequence[bool]:
        found = super()._step_unless(*flags)
        if self._trial is not None and not any(found):
            self._trial.seconds.append(0.0)
            if len(self._trial.seconds) > _ITERATIONS_BEFORE + 2 * _ITERATIONS_EACH:
                self._decide(self._trial.medians)
        return found

    def _mean_unless(self, flags: Sequence[bool]) -> Sequence[bool]:
        exchange = self._exchange_in_use()
        with self._timed():
            if exchange is None:
                return super()._mean_unless(flags)
            return exchange.mean(self.actual_optimizer.target, self.zero_fill, flags)

    def _decide(self, medians: tuple[float, float]) -> None:
        """Keep the faster way, judged by the slowest rank. Collective."""
        slowest: Any = self.communicator.allreduce(np.array(medians), "max")
        with_overlap, without = slowest
        self._trial = None
        if without < with_overlap:
            self._close()
            self._exchange, self._is_possible = None, False


class _Trial:
    """Times iterations that alternate, equally on all ranks, between overlap and none."""

    def __init__(self) -> None:
        self.seconds = [0.0]  # per iteration; the last one is still running

    @property
    def overlaps(self) -> bool:
        """Whether the current iteration uses overlap."""
        number = len(self.seconds) - 1 - _ITERATIONS_BEFORE
        return number < 0 or number % 2 == 0

    @property
    def medians(self) -> tuple[float, float]:
        """Median seconds of an iteration on this rank, with overlap and without."""
        measured = self.seconds[_ITERATIONS_BEFORE:-1]
        return statistics.median(measured[::2]), statistics.median(measured[1::2])

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the ``with`` block, which overlap can shorten, to the iteration."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[-1] += perf_counter() - start
