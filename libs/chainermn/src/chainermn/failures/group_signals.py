"""Notice signals that mpiexec, or a scheduler, sends to all processes of the job.

A rank that a signal kills cannot report it. But the signal also reaches a process that stays in
the rank's process group. With MPICH 5.0.2, SIGTERM there means that ``mpiexec`` got it, because
after a crash the others get SIGKILL. Open MPI 5.0.11 sends SIGCONT, then SIGTERM, in both cases:
before any rank is gone, or after one is.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

_SIGNALS = (signal.SIGCONT, signal.SIGTERM)
# A rank on another host may be gone before the signal arrives here.
_SECONDS_TO_ARRIVE = 0.1
# Ranks that are still there after this time have handled the signal.
_SECONDS_TO_OBEY = 30.0


class GroupSignals:
    """Tells whether the job has been terminated. ``reader`` gives the numbers of signals."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        os.set_blocking(reader, False)
        self._terminated_at = float("-inf")

    @classmethod
    def of_this_group(cls) -> GroupSignals:
        """Leave the process group, in which a child stays for as long as this process lives."""
        (reader, writer), (until, _) = os.pipe(), os.pipe()
        if not os.fork():
            os.dup2(until, 0)
            os.dup2(writer, 1)
            os.closerange(2, 1 << 20)  # mpiexec waits until standard error closes
            _note_signals()
        os.close(writer)
        os.close(until)
        os.setsid()
        return cls(reader)

    def fileno(self) -> int:
        """Return the file descriptor to wait for."""
        return self._reader

    def hear(self) -> bool:
        """Note signals that have arrived; return False if there will be no more."""
        try:
            numbers = os.read(self._reader, 64)
        except BlockingIOError:  # `have_ended_the_job` was faster
            return True
        if signal.SIGTERM in numbers:
            self._terminated_at = time.monotonic()
        return bool(numbers)

    def have_ended_the_job(self) -> bool:
        """Tell, once a rank is gone, whether SIGTERM to all processes is the cause."""
        is_recent = time.monotonic() - self._terminated_at < _SECONDS_TO_OBEY
        if not is_recent and select.select([self], [], [], _SECONDS_TO_ARRIVE)[0]:
            is_recent = os.read(self._reader, 64).startswith(bytes([signal.SIGTERM]))
        return is_recent


def _note_signals() -> None:
    """Write the number of each signal to standard output, until standard input ends."""
    with contextlib.suppress(OSError):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.set_blocking(1, False)
        signal.set_wakeup_fd(1, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.read(0, 1)
    os._exit(0)
