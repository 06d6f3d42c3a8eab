"""Advance exchanges during backward, in a thread or between its functions."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import chainer

from chainermn.gradients.overlap.turns import Turns
from chainermn.transport.host.mpi import ThreadSupport
from chainermn.transport.reducer import Pending

if TYPE_CHECKING:
    from chainermn.gradients.exchange import GradientExchange

#: Starts an exchange on a stream. Yields whenever it has to wait for other ranks.
Exchange: TypeAlias = Callable[["GradientExchange"], Iterator[None]]

# Much shorter than the exchange of a bucket, much longer than a check of its progress.
_SECONDS_BETWEEN_POLLS = 1e-4
_SECONDS_FOR_ENDING = 5.0

# Kept alive, because MPI may still write to the memory of an unfinished exchange.
_unfinished: list[Iterator[None]] = []


class ProgressEngine:
    """Runs exchanges, and starts them in the order in which they were submitted.

    It advances the exchanges in progress in turn, because MPI makes progress only while it is
    called.

    Parameters
    ----------
    streams : sequence of GradientExchange
        Duplicates of the exchange, so that several buckets can be in progress at a time. On every
        rank, the ``k``-th exchange uses stream ``k % len(streams)`` alone.
    support : {'multiple', 'serialized', 'funneled'}
        How threads may call MPI. With ``'multiple'``, a thread advances exchanges, with short
        sleeps. With ``'serialized'``, that thread gets turns while backward is inside a function
        that does not call MPI, which is one of Chainer's without hooks. With ``'funneled'``, the
        training thread advances exchanges after each function of backward, and while it waits.
    """

    def __init__(self, streams: Sequence[GradientExchange], support: ThreadSupport) -> None:
        self._streams = streams
        self._submitted: queue.SimpleQueue[tuple[Exchange, Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._under_way: list[tuple[Iterator[None], Future[Any]] | None] = [None] * len(streams)
        self._turn = 0
        self._is_ending = threading.Event()
        self._turns = Turns() if support == "serialized" else None
        self._thread: threading.Thread | None = None
        if support != "funneled":
            self._thread = threading.Thread(
                target=self._run, name="chainermn-overlap", daemon=True
            )
            self._thread.start()

    def submit(self, exchange: Exchange) -> Future[Any]:
        """Run ``exchange(stream)`` when its stream is free."""
        future: Future[Any] = Future()
        self._submitted.put((exchange, future))
        if self._thread is None:
            self._advance()
        return future

    def wait(self, future: Future[Any]) -> Any:
        """Wait until an exchange is done, and return its result or raise its exception."""
        if self._is_advanced_here:
            self._advance_until(future.done)
        return future.result()

    def wait_for_mpi(self, pending: Pending) -> None:
        """Wait for an operation of the training thread while exchanges advance."""
        if self._is_advanced_here:
            self._advance_until(pending.Test)
        else:
            pending.Wait()

    def in_backward(self) -> AbstractContextManager[Any]:
        """Return a context for a backward during which exchanges advance."""
        return _AtEachFunction(self) if self._is_advanced_here else contextlib.nullcontext()

    def end(self) -> None:
        """Stop, even in the middle of an exchange. Not collective."""
        self._is_ending.set()
        self._submitted.put(None)
        if self._turns is not None:
            self._turns.end()
        if self._thread is None:
            self._run()
        # The thread itself may run the garbage collector, which may call this.
        elif threading.current_thread() is not self._thread:
            self._thread.join(_SECONDS_FOR_ENDING)

    def _run(self) -> None:
        turns = self._turns
        while not self._is_ending.is_set():
            if turns is None:
                has_moved = self._advance(may_wait=True)
            else:
                with turns.borrowed() as is_lent:
                    has_moved = is_lent and self._advance()
            if not has_moved:
                time.sleep(_SECONDS_BETWEEN_POLLS)
        _unfinished.extend(running[0] for running in self._under_way if running is not None)

    @property
    def _is_advanced_here(self) -> bool:
        return self._thread is None or self._turns is not None

    def _advance_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            if not self._advance():
                time.sleep(_SECONDS_BETWEEN_POLLS)

    def _advance(self, may_wait: bool = False) -> bool:
        """Advance each exchange by one step; return whether any of them started or ended.

        If none is in progress and ``may_wait``, wait for the next one to be submitted.
        """
        has_moved = False
        must_wait = may_wait and not any(self._under_way)
        if self._under_way[self._turn] is None and (must_wait or not self._submitted.empty()):
            submitted = self._submitted.get()
            if submitted is not None:
                exchange, future = submitted
                self._under_way[self._turn] = exchange(self._streams[self._turn]), future
                self._turn = (self._turn + 1) % len(self._streams)
                has_moved = True
        for number, running in enumerate(self._under_way):
            if running is not None and _is_over_after_a_step(*running):
                self._under_way[number] = None
                has_moved = True
        return has_moved


class _AtEachFunction(chainer.FunctionHook):
    """Lends turns during functions of backward, or advances exchanges after them."""

    def __init__(self, engine: ProgressEngine) -> None:
        self.name = f"chainermn-progress-{id(self)}"
        self._engine = engine
        self._lent_from: Turns | None = None

    def backward_preprocess(
        self, function: chainer.FunctionNode, in_data: Any, out_grad: Any
    ) -> None:
        self._take_back()
        turns = self._engine._turns
        if turns is not None and _cannot_call_mpi(function):
            turns.lend()
            self._lent_from = turns

    def backward_postprocess(
        self, function: chainer.FunctionNode, in_data: Any, out_grad: Any
    ) -> None:
        if self._lent_from is None:
            self._engine._advance()
        self._take_back()

    def deleted(self, function: None = None) -> None:
        self._take_back()  # needed if a function has raised

    def _take_back(self) -> None:
        if self._lent_from is not None:
            self._lent_from.take_back()
            self._lent_from = None


def _cannot_call_mpi(function: chainer.FunctionNode) -> bool:
    """Tell whether the backward of a function does not run any code of the user."""
    is_chainers = type(function).__module__.startswith("chainer.functions.")
    has_other_hooks = len(chainer.get_function_hooks()) > 1 or function._n_local_function_hooks > 0
    return is_chainers and not has_other_hooks


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
