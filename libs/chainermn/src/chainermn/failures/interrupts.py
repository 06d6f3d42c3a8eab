"""Notice an interrupt that does not reach the main thread, as that is in a call of C code."""

from __future__ import annotations

import signal
import threading
import time

from chainermn.failures.stack import Place, main_stack

# For a main thread that can, to handle a KeyboardInterrupt.
_PATIENCE = 3.0


class Interrupts:
    """Tells whether the main thread takes notice of an interrupt (SIGINT).

    Parameters
    ----------
    writer : int
        File descriptor of a pipe whose other end somebody reads: `note` wants to be told of
        what came. Nothing is written if somebody else uses ``signal.set_wakeup_fd``.
    """

    def __init__(self, writer: int) -> None:
        self._since = float("inf")
        self._stack: list[Place] | None = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            if previous != -1:
                signal.set_wakeup_fd(previous)

    def note(self, numbers: bytes) -> None:
        """Take note of signals, by their numbers."""
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in numbers and is_default and self._stack is None:
            self._since, self._stack = time.monotonic(), main_stack()

    def are_ignored(self) -> bool:
        """Tell whether the main thread has not moved since an interrupt some seconds ago."""
        if time.monotonic() - self._since < _PATIENCE:
            return False
        is_stuck = self._stack == main_stack()
        self._since, self._stack = float("inf"), None
        return is_stuck


def stop_in_child() -> None:
    """Let a forked child not write into the pipe of its parent."""
    signal.set_wakeup_fd(-1)
