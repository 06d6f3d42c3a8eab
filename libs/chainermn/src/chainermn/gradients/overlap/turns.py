"""Turns of two threads in calling MPI, where it may be called by one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import chainer


class Turns:
    """Turns in calling MPI: the training thread may, except while it lends this to another."""

    def __init__(self) -> None:
        self._is_lent = threading.Event()
        self._calls = threading.Lock()
        self._calls.acquire()
        self._is_here = True  # that is, the training thread holds the lock

    def lend(self) -> None:
        """Let the other thread call MPI."""
        if self._is_here:
            self._is_here = False
            self._calls.release()
        self._is_lent.set()

    def take_back(self) -> None:
        """Wait until the other thread has ended its turn, and let it have no more."""
        self._is_lent.clear()  # so that the other thread does not take the lock again first
        if not self._is_here:
            self._calls.acquire()
            self._is_here = True

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[bool]:
        """Wait for a turn; yield whether it has not been taken back meanwhile."""
        self._is_lent.wait()
        with self._calls:
            yield self._is_lent.is_set()

    @contextlib.contextmanager
    def lent_in_backward(self) -> Iterator[None]:
        """Lend while a backward inside the ``with`` block is inside functions of Chainer."""
        try:
            with _AroundEachFunction(self):
                yield
        finally:
            self.take_back()  # also if a function has raised


class _AroundEachFunction(chainer.FunctionHook):
    """Lends turns while functions that cannot call MPI compute in backward."""

    def __init__(self, turns: Turns) -> None:
        self.name = f"chainermn-turns-{id(self)}"
        self._turns = turns

    def backward_preprocess(
        self, function: chainer.FunctionNode, in_data: Any, out_grad: Any
    ) -> None:
        if type(function).__module__.startswith("chainer.functions."):
            self._turns.lend()
        else:
            self._turns.take_back()

    def backward_postprocess(
        self, function: chainer.FunctionNode, in_data: Any, out_grad: Any
    ) -> None:
        self._turns.take_back()
