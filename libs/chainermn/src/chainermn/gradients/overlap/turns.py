"""Let two threads take turns in calling MPI, if only one thread at a time may call it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Turns in calling MPI: the training thread may call it unless it lends its turn."""

    def __init__(self) -> None:
        self._is_lent = threading.Event()
        self._is_over = False
        self._calls = threading.Lock()
        self._calls.acquire()
        self._is_here = True  # whether the training thread holds the lock

    def lend(self) -> None:
        """Let the other thread call MPI."""
        self._is_lent.set()
        if self._is_here:
            self._is_here = False
            self._calls.release()

    def take_back(self) -> None:
        """End the turn of the other thread, and wait until it is over."""
        self._is_lent.clear()  # keeps the other thread from taking the lock again first
        if not self._is_here:
            self._calls.acquire()
            self._is_here = True

    def end(self) -> None:
        """Stop the other thread's waiting for turns. Any thread may call this."""
        self._is_over = True
        self._is_lent.set()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[bool]:
        """Wait for a turn; yield False if there are no more."""
        self._is_lent.wait()
        if self._is_over:
            yield False
            return
        with self._calls:
            yield self._is_lent.is_set() and not self._is_over
