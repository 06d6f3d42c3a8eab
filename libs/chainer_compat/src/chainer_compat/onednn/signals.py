"""No signal is handled while oneDNN computes."""

from __future__ import annotations

import ctypes
import functools
import signal
from collections.abc import Callable
from typing import Any

# Not handled later: the thread cannot go on before.
_OF_THE_THREAD = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}

_Signals = ctypes.c_ulong * 16  # sigset_t
# Keeps the lock of the interpreter, as the calls take less than a microsecond.
_libc = ctypes.PyDLL(None)


@functools.cache
def _those_that_wait() -> Any:
    found = _Signals()
    for number in signal.valid_signals() - {getattr(signal, name) for name in _OF_THE_THREAD}:
        _libc.sigaddset(found, int(number))
    return found


def held_back(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that lets signals wait until it has ended.

    Kernels of ``dnnl_sgemm`` keep values below the stack pointer, where a handler overwrites
    them: results become wrong, and memory is damaged. The threads that OpenMP starts inherit what
    waits, so that no handler runs in them either.
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
