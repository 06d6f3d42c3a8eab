"""Let two threads take turns in calling MPI, if only one thread at a time may call it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Turns in calling MPI: the training thread may call it unless it lends its turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_lent = False
        self._is_borrowed = False
        self._is_over = False

    def lend(self) -> None:
        """Let the other thread call MPI."""
        with self._changed:
            self._is_lent = True
            self._changed.notify_all()

    def take_back(self) -> None:
        """End the turn of the other thread, and wait until it is over."""
        with self._changed:
            self._is_lent = False
            self._changed.wait_for(lambda: not self._is_borrowed)

    def end(self) -> None:
        """Stop the other thread's waiting for turns. Any thread may call this."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[bool]:
        """Wait for a turn; yield False if there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_lent or self._is_over)
            self._is_borrowed = not self._is_over
        try:
            yield self._is_borrowed
        finally:
            with self._changed:
                self._is_borrowed = False
                self._changed.notify_all()
