"""Find out from another thread where the main thread is and whether it reacts to interrupts.

This uses `faulthandler`, which does not create frame objects: ``sys._current_frames`` crashed
CPython 3.11 when the other thread was running the frame.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import sysconfig
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
# Seconds that a main thread gets to handle a KeyboardInterrupt, if it is running Python.
_PATIENCE = 3.0
_lock = threading.Lock()


class Place(NamedTuple):
    """A line of a program, with the function that contains it."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def main_stack() -> list[Place]:
    """Return the innermost 100 calls of the main thread, innermost first."""
    with _lock:
        file = _scratch_file()
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(file, all_threads=True)
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    main = f"{threading.main_thread().ident or 0:016x}"
    stacks = text.split("hread 0x")  # "Thread" or "Current thread"
    mine = next((stack for stack in stacks if stack.startswith(main)), "")
    return [Place(*found.groups()) for line in mine.splitlines() if (found := _LINE.match(line))]


@functools.cache
def _scratch_file() -> int:
    # A pipe or a disk might be full.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stacks")
    import tempfile  # not needed on Linux

    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file


def place() -> str:
    """Return the main thread's line in the user's code, and the innermost line if different."""
    stack = main_stack()
    return ", now in ".join(dict.fromkeys(map(str, [*users_places(stack)[:1], *stack[:1]])))


def users_places(stack: Iterable[Place]) -> list[Place]:
    """Return the places of a stack that are in the user's code rather than in a library."""
    return [place for place in stack if not place.file.startswith(_libraries())]


@functools.cache
def _libraries() -> tuple[str, ...]:
    # To find the cause of a stall, users need the line that called the library.
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return str(Path(__file__).parent.parent), *map(sysconfig.get_path, names), "<"


class Interrupts:
    """Tells whether the main thread, which may be stuck in C code, reacts to SIGINT.

    Signal numbers go to the pipe's file descriptor ``writer``, unless the program itself uses
    ``signal.set_wakeup_fd``. Pass the bytes read from the pipe to `note`.
    """

    def __init__(self, writer: int) -> None:
        self._since = float("inf")
        self._stack: list[Place] | None = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            if previous != -1:
                signal.set_wakeup_fd(previous)

    def note(self, numbers: bytes) -> None:
        """Remember signals that have arrived, given their numbers."""
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in numbers and is_default and self._stack is None:
            self._since, self._stack = time.monotonic(), main_stack()

    def are_ignored(self) -> bool:
        """Tell whether the main thread has not moved for some seconds since an interrupt."""
        if time.monotonic() - self._since < _PATIENCE:
            return False
        is_stuck = self._stack == main_stack()
        self._since, self._stack = float("inf"), None
        return is_stuck
