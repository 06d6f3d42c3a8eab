"""A stack of their own for the handlers of signals."""

from __future__ import annotations

import ctypes
import mmap
from ctypes import byref, c_char, c_int, c_size_t, c_void_p

_DISABLED = 2  # SS_DISABLE
_BYTES = 1 << 16
_memory: mmap.mmap | None = None


class _Stack(ctypes.Structure):
    """``stack_t`` of the C library."""

    _fields_ = (("memory", c_void_p), ("flags", c_int), ("size", c_size_t))


def separate() -> None:
    """Let the handlers of Python's signals run on a stack of their own in this thread.

    Kernels of ``dnnl_sgemm`` keep values below the stack pointer, where a handler that runs on
    their stack overwrites them: results become wrong, and memory is damaged. Nothing is done if
    there is such a stack already, as ``faulthandler`` makes one.
    """
    global _memory
    sigaltstack = ctypes.CDLL(None).sigaltstack
    sigaltstack.argtypes = c_void_p, c_void_p
    found = _Stack()
    if sigaltstack(None, byref(found)) or not found.flags & _DISABLED:
        return
    _memory = mmap.mmap(-1, _BYTES)
    stack = _Stack(ctypes.addressof(c_char.from_buffer(_memory)), 0, _BYTES)
    sigaltstack(byref(stack), None)
