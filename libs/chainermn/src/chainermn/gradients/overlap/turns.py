"""Turns of two threads in calling MPI, where it may be called by one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Turns in calling MPI: the training thread may, except while it lends this to another."""

    def __init__(self) -> None:
        self._is_lent = threading.Event()
        self._is_over = False
        self._calls = threading.Lock()
        self._calls.acquire()
        self._is_here = True  # that is, the training thread holds the lock

    def lend(self) -> None:
        """Let the other thread call MPI."""
        self._is_lent.set()
        if self._is_here:
            self._is_here = False
            self._calls.release()

    def take_back(self) -> None:
        """Wait until the other thread has ended its turn, and let it have no more."""
        self._is_lent.clear()  # so that the other thread does not take the lock again first
        if not self._is_here:
            self._calls.acquire()
            self._is_here = True

    def end(self) -> None:
        """Let the other thread wait no longer. Any thread may call this."""
        self._is_over = True
        self._is_lent.set()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[bool]:
        """Wait for a turn; yield whether there still is one."""
        self._is_lent.wait()
        if self._is_over:
            yield False
            return
        with self._calls:
            yield self._is_lent.is_set() and not self._is_over
