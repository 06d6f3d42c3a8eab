"""Keep the memory that a process frees for its next allocations."""

from __future__ import annotations

import contextlib
import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_BYTES = 1 << 28
_MOST_BYTES_ONCE = 1 << 25  # the limit of older versions of glibc


def keep_freed_memory() -> None:
    """Keep the memory of large arrays in this process when they are freed.

    By default, glibc returns it to the kernel, which must clear it page by page for the next
    array. Training allocates the same arrays in every iteration, so this takes time in every
    iteration. The process keeps up to 256 MiB more. Setting any of glibc's variables for this
    turns it off. Other C libraries are left as they are.
    """
    if any(variable in os.environ for variable in _VARIABLES):
        return
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _BYTES) or mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES_ONCE)
        mallopt(_M_TRIM_THRESHOLD, _BYTES)
