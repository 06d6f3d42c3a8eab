"""Keep signal handlers from running while oneDNN computes."""

from __future__ import annotations

import ctypes
import functools
import signal
from collections.abc import Callable
from typing import Any

# These cannot wait, because the thread cannot continue before they are handled.
_OF_THE_THREAD = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}

_Signals = ctypes.c_ulong * 16  # sigset_t
# Does not release the GIL, since the calls take less than a microsecond.
_libc = ctypes.PyDLL(None)


@functools.cache
def _those_that_wait() -> Any:
    found = _Signals()
    for number in signal.valid_signals() - {getattr(signal, name) for name in _OF_THE_THREAD}:
        _libc.sigaddset(found, int(number))
    return found


def held_back(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes signals wait until it has returned.

    Kernels of ``dnnl_sgemm`` keep values below the stack pointer, where a signal handler
    overwrites them, which corrupts results and memory. Threads that OpenMP starts inherit the
    mask, so handlers do not run in them either.
    """
    mask, waiting = _libc.pthread_sigmask, _those_that_wait()

    def call(*arguments: Any) -> None:
        before = _Signals()
        mask(signal.SIG_BLOCK, waiting, before)
        try:
            function(*arguments)
        finally:
            mask(signal.SIG_SETMASK, before, None)

    return call
