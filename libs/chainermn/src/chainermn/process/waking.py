"""How often a process that waits for others wakes up to look."""

from __future__ import annotations

import contextlib
import ctypes

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
# Measured with 64 ranks on two cores, which MPICH has sleep for 1 us at a time: at Linux's usual
# slack of 50 us, waking up took a quarter of the time in which a communicator is created.
_WAKES_PER_SECOND_AND_CORE = 64_000


def wake_up_rarely(ranks_per_core: float) -> None:
    """Let short sleeps of this thread take longer, so that all ranks together wake up rarely.

    Those that wait would otherwise use up the cores of those that compute. With up to three ranks
    per core nothing changes, nor on systems other than Linux.
    """
    with contextlib.suppress(AttributeError, OSError):
        prctl = ctypes.CDLL(None).prctl
        nanoseconds = int(1e9 * ranks_per_core / _WAKES_PER_SECOND_AND_CORE)
        if nanoseconds > prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0):
            prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds), 0, 0, 0)
