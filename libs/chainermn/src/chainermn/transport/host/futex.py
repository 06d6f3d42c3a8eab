"""Let processes that share memory wait for each other without using a core."""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import sys
from typing import Any, ClassVar


class Futex:
    """Lets processes sleep until the lower half of a word changes: futex(2)."""

    _NUMBERS: ClassVar = {("linux", "x86_64"): 202}  # numbers of the system call
    _WAIT, _WAKE = 0, 1
    _ALL = 2**31 - 1

    def __init__(self, number: int, address: int) -> None:
        self._call = _system_call()
        self._number = ctypes.c_long(number)
        self._address = ctypes.c_void_p(address)

    @classmethod
    def is_available(cls) -> bool:
        """Tell whether this system has futexes and this library knows the number of the call."""
        return (sys.platform, platform.machine()) in cls._NUMBERS and sys.maxsize > 2**32

    @classmethod
    def at(cls, memory: mmap.mmap, offset: int) -> Futex | None:
        """Return the futex at an offset in memory; None if futexes are not available."""
        if not cls.is_available():
            return None
        number = cls._NUMBERS[sys.platform, platform.machine()]
        return cls(number, ctypes.addressof(ctypes.c_char.from_buffer(memory, offset)))

    def wait(self, word: int, seconds: float) -> None:
        """Unless the word has changed, sleep until `wake`, but at most this many seconds."""
        whole, rest = divmod(seconds, 1)
        limit = (ctypes.c_long * 2)(int(whole), int(rest * 1e9))
        self._call(
            self._number, self._address, self._WAIT, ctypes.c_uint32(word), ctypes.byref(limit)
        )

    def wake(self) -> None:
        """Wake all sleeping processes."""
        self._call(self._number, self._address, self._WAKE, self._ALL, None)


@functools.cache
def _system_call() -> Any:
    return ctypes.CDLL(None).syscall
