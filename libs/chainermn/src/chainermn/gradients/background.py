"""A thread that carries on with several exchanges at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeAlias

Exchange: TypeAlias = Callable[[int], Iterator[None]]

# Short against the time that a bucket takes, long against that of a look at its progress.
_SECONDS_BETWEEN_LOOKS = 1e-4
_SECONDS_FOR_ENDING = 5.0


class BackgroundThread:
    """Runs exchanges, each begun in the order in which they were submitted.

    An exchange is a generator that yields whenever it has to wait for other ranks; those under
    way are then carried on in turn, with short sleeps between. MPI itself makes progress only
    while it is called.

    Parameters
    ----------
    n_lanes : int
        How many exchanges may be under way at a time. The ``k``-th one has lane ``k % n_lanes``
        for itself, on every rank.
    """

    def __init__(self, n_lanes: int) -> None:
        self._n_lanes = n_lanes
        self._submitted: queue.SimpleQueue[tuple[Exchange, Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chainermn-overlap", daemon=True)
        self._thread.start()

    def submit(self, exchange: Exchange) -> Future[None]:
        """Run ``exchange(lane)`` when it is its turn.

        Returns
        -------
        concurrent.futures.Future
            Its result is None, or the exception that the exchange raised.
        """
        future: Future[None] = Future()
        self._submitted.put((exchange, future))
        return future

    def end(self) -> None:
        """End the thread, also in the midst of an exchange, unless MPI keeps it."""
        self._is_ending.set()
        self._submitted.put(None)
        if threading.current_thread() is not self._thread:  # which may collect garbage too
            self._thread.join(_SECONDS_FOR_ENDING)

    def _run(self) -> None:
        lanes: list[tuple[Iterator[None], Future[None]] | None] = [None] * self._n_lanes
        turn = 0
        while not self._is_ending.is_set():
            has_moved = False
            if lanes[turn] is None and (submitted := self._next(not any(lanes))) is not None:
                exchange, future = submitted
                lanes[turn] = exchange(turn), future
                turn = (turn + 1) % self._n_lanes
                has_moved = True
            for lane, running in enumerate(lanes):
                if running is not None and _is_over_after_a_step(*running):
                    lanes[lane] = None
                    has_moved = True
            if not has_moved:
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _next(self, must_wait: bool) -> tuple[Exchange, Future[None]] | None:
        try:
            return self._submitted.get(block=must_wait)
        except queue.Empty:
            return None


def _is_over_after_a_step(exchange: Iterator[None], future: Future[None]) -> bool:
    try:
        next(exchange)
    except StopIteration:
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)
    else:
        return False
    return True
