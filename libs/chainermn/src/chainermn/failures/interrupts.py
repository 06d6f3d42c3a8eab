"""Notice an interrupt that the main thread cannot handle because it is stuck in C code."""

from __future__ import annotations

import signal
import threading
import time

from chainermn.failures.stack import Place, main_stack

# Seconds for a main thread that runs Python to handle a KeyboardInterrupt.
_PATIENCE = 3.0


class Interrupts:
    """Tells whether the main thread reacts to an interrupt (SIGINT).

    Parameters
    ----------
    writer : int
        File descriptor of a pipe that receives the numbers of signals; pass what comes out to
        `note`. Left alone if the program uses ``signal.set_wakeup_fd`` itself.
    """

    def __init__(self, writer: int) -> None:
        self._since = float("inf")
        self._stack: list[Place] | None = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            if previous != -1:
                signal.set_wakeup_fd(previous)

    def note(self, numbers: bytes) -> None:
        """Take note of signals that have arrived, by their numbers."""
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in numbers and is_default and self._stack is None:
            self._since, self._stack = time.monotonic(), main_stack()

    def are_ignored(self) -> bool:
        """Tell whether the main thread has stood still for seconds since an interrupt."""
        if time.monotonic() - self._since < _PATIENCE:
            return False
        is_stuck = self._stack == main_stack()
        self._since, self._stack = float("inf"), None
        return is_stuck


def stop_in_child() -> None:
    """Stop a forked child from writing to its parent's pipe."""
    signal.set_wakeup_fd(-1)
