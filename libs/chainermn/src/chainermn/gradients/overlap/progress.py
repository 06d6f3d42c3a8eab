"""Engines that advance exchanges during backward: in a thread, or between its functions."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import chainer
from typing_extensions import override

#: Begins an exchange on a lane, given by its number. Yields whenever it has to wait for others.
Exchange: TypeAlias = Callable[[int], Iterator[None]]

# Much shorter than the exchange of a bucket, much longer than a check of its progress.
_SECONDS_BETWEEN_POLLS = 1e-4
_SECONDS_FOR_ENDING = 5.0

# Kept alive, because MPI may still write to the memory of an exchange that is not over.
_unfinished: list[Iterator[None]] = []


class ProgressEngine(ABC):
    """Runs exchanges, begun in the order in which they were submitted.

    The exchanges under way are advanced in turn, because MPI makes progress only while it is
    called.

    Parameters
    ----------
    n_lanes : int
        Number of exchanges that may be under way at a time. The ``k``-th exchange has lane
        ``k % n_lanes`` for itself, on every rank.
    """

    def __init__(self, n_lanes: int) -> None:
        self._submitted: queue.SimpleQueue[tuple[Exchange, Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lanes: list[tuple[Iterator[None], Future[Any]] | None] = [None] * n_lanes
        self._turn = 0

    def submit(self, exchange: Exchange) -> Future[Any]:
        """Run ``exchange(lane)`` when its lane is free.

        Returns
        -------
        concurrent.futures.Future
            The return value of the exchange, or the exception that it raised.
        """
        future: Future[Any] = Future()
        self._submitted.put((exchange, future))
        return future

    @abstractmethod
    def wait(self, future: Future[Any]) -> Any:
        """Wait until an exchange is over, and return its result or raise its exception."""

    @abstractmethod
    def in_backward(self) -> AbstractContextManager[Any]:
        """Return a context for a backward during which exchanges advance."""

    @abstractmethod
    def end(self) -> None:
        """Stop, even in the middle of an exchange. Not collective."""

    def _advance(self, may_wait: bool) -> bool:
        """Advance each exchange by one step; tell whether any began or ended.

        Parameters
        ----------
        may_wait : bool
            Whether to wait for the next exchange to be submitted if none is under way.
        """
        has_moved = False
        if self._lanes[self._turn] is None:
            submitted = self._next(may_wait and not any(self._lanes))
            if submitted is not None:
                exchange, future = submitted
                self._lanes[self._turn] = exchange(self._turn), future
                self._turn = (self._turn + 1) % len(self._lanes)
                has_moved = True
        for lane, running in enumerate(self._lanes):
            if running is not None and _is_over_after_a_step(*running):
                self._lanes[lane] = None
                has_moved = True
        return has_moved

    def _next(self, must_wait: bool) -> tuple[Exchange, Future[Any]] | None:
        try:
            return self._submitted.get(block=must_wait)
        except queue.Empty:
            return None

    def _keep_unfinished(self) -> None:
        _unfinished.extend(running[0] for running in self._lanes if running is not None)


class ThreadEngine(ProgressEngine):
    """Advances exchanges in a thread, with short sleeps. Needs ``MPI_THREAD_MULTIPLE``."""

    def __init__(self, n_lanes: int) -> None:
        super().__init__(n_lanes)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chainermn-overlap", daemon=True)
        self._thread.start()

    @override
    def wait(self, future: Future[Any]) -> Any:
        return future.result()

    @override
    def in_backward(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    @override
    def end(self) -> None:
        self._is_ending.set()
        self._submitted.put(None)
        if threading.current_thread() is not self._thread:  # whose garbage collector may call this
            self._thread.join(_SECONDS_FOR_ENDING)

    def _run(self) -> None:
        while not self._is_ending.is_set():
            if not self._advance(may_wait=True):
                time.sleep(_SECONDS_BETWEEN_POLLS)
        self._keep_unfinished()


class PollingEngine(ProgressEngine):
    """Advances exchanges after each function that backward computes, and in `wait`."""

    @override
    def submit(self, exchange: Exchange) -> Future[Any]:
        future = super().submit(exchange)
        self._advance(may_wait=False)
        return future

    @override
    def wait(self, future: Future[Any]) -> Any:
        while not future.done():
            if not self._advance(may_wait=False):
                time.sleep(_SECONDS_BETWEEN_POLLS)
        return future.result()

    @override
    def in_backward(self) -> AbstractContextManager[Any]:
        return _AfterEachFunction(lambda: self._advance(may_wait=False))

    @override
    def end(self) -> None:
        self._keep_unfinished()


class _AfterEachFunction(chainer.FunctionHook):
    """Calls a function after each function that backward computes."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.name = f"chainermn-progress-{id(self)}"
        self._call = call

    def backward_postprocess(
        self, function: chainer.FunctionNode, in_data: Any, out_grad: Any
    ) -> None:
        self._call()


def _is_over_after_a_step(exchange: Iterator[None], future: Future[Any]) -> bool:
    try:
        next(exchange)
    except StopIteration as end:
        future.set_result(end.value)
    except BaseException as error:
        future.set_exception(error)
    else:
        return False
    return True
