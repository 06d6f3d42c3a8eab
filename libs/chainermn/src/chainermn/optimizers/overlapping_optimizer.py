"""Exchange gradients while backward still computes others."""

from __future__ import annotations

import statistics
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from chainermn.gradients.overlap.exchange import OverlappedExchange
from chainermn.gradients.parameters import is_on_gpu
from chainermn.optimizers.exchanges import background_exchange
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn.optimizers.recorded import Exchange

if TYPE_CHECKING:
    from chainermn.gradients.step import Step

# Not measured, because they learn the order of gradients and touch memory for the first time.
_ITERATIONS_BEFORE = 3
_ITERATIONS_EACH = 7


class OverlappingOptimizer(MultiNodeOptimizer):
    """Overlaps the exchange with backward; its steps are those of `MultiNodeOptimizer`.

    See `chainermn.gradients.overlap.exchange`. If the communicator does not support that, or if
    ``overlap='auto'`` finds it slower, the exchange follows backward.
    """

    _is_possible = True
    _overlapped: OverlappedExchange | None = None
    _trial: _Trial | None = None
    _close: Any = None

    def _backward(self, loss: chainer.Variable, loss_scale: Any) -> None:
        """Run ``loss.backward()`` and start the exchange."""
        target, overlapped = self.actual_optimizer.target, self._overlapped_now()
        with self._timed():
            if overlapped is None:
                super()._backward(loss, loss_scale)
            else:
                overlapped.backward(loss, loss_scale, target, self.zero_fill)

    def _exchange_of_recorded_steps(self) -> Exchange | str:
        exchange = super()._exchange_of_recorded_steps()
        if self._overlapped is None or isinstance(exchange, str):
            return exchange
        if not self._overlapped.is_advanced_here:
            return f"{type(self.communicator).__name__} overlaps in another thread"
        return self._overlapped

    def _overlapped_now(self) -> OverlappedExchange | None:
        """Return the exchange if this iteration overlaps."""
        return None if self._trial is not None and not self._trial.overlaps else self._overlapped

    def _timed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._trial is None else self._trial.timed()

    def _agree_on_settings(self) -> None:
        super()._agree_on_settings()
        if self._overlapped is not None:
            self._overlapped.drop()
        elif self._is_possible:
            self._begin_to_overlap()

    def _begin_to_overlap(self) -> None:
        if self._overlap == "auto" and self._is_on_gpu_anywhere():
            # 'auto' is not measured yet on GPUs.
            return
        try:
            exchange = background_exchange(self.communicator)
        except RuntimeError as error:
            self._is_possible = False
            if self._overlap is True and self.communicator.rank == 0:
                warnings.warn(f"overlap=True has no effect: {error}", stacklevel=6)
            return
        self._overlapped = OverlappedExchange(exchange, self._compressor)
        self._close = weakref.finalize(self, self._overlapped.close)
        self._trial = _Trial() if self._overlap == "auto" else None

    def _is_on_gpu_anywhere(self) -> bool:
        return any(self.communicator.allgather_obj(is_on_gpu(self.actual_optimizer.target)))

    def _average(self, step: Step) -> Step:
        overlapped = self._overlapped_now()
        with self._timed():
            if overlapped is None:
                return super()._average(step)
            return overlapped.mean(self.actual_optimizer.target, self.zero_fill, step)

    def _take_step(self) -> None:
        super()._take_step()
        if self._trial is not None:
            self._trial.seconds.append(0.0)
            if len(self._trial.seconds) > _ITERATIONS_BEFORE + 2 * _ITERATIONS_EACH:
                self._decide(self._trial.medians)

    def _decide(self, medians: tuple[float, float]) -> None:
        """Keep the faster way, judged by the slowest rank. Collective."""
        slowest: Any = self.communicator.allreduce(np.array(medians), "max")
        with_overlap, without = slowest
        self._trial = None
        if without < with_overlap:
            self._close()
            self._overlapped, self._is_possible = None, False


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
