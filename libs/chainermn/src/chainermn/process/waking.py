"""Limit how often a process that waits for others wakes up."""

from __future__ import annotations

import contextlib
import ctypes

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
# Measured with 64 ranks on two cores, where MPICH sleeps for 1 us at a time: with Linux's default
# slack of 50 us, waking up took a quarter of the time that creating a communicator takes.
_WAKES_PER_SECOND_AND_CORE = 64_000


def wake_up_rarely(ranks_per_core: float) -> None:
    """Make short sleeps of this thread longer, so that the ranks together wake up less often.

    Otherwise, waiting ranks would take the cores from ranks that compute. This does nothing with
    up to three ranks per core, and on systems other than Linux.
    """
    with contextlib.suppress(AttributeError, OSError):
        prctl = ctypes.CDLL(None).prctl
        nanoseconds = int(1e9 * ranks_per_core / _WAKES_PER_SECOND_AND_CORE)
        if nanoseconds > prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0):
            prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds), 0, 0, 0)
