"""Find out where the main thread is, from another thread.

Not by ``sys._current_frames``: looking at a frame that another thread is running crashed CPython
3.11. `faulthandler` creates no frame objects.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import threading
from typing import NamedTuple

_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_lock = threading.Lock()


class Place(NamedTuple):
    """A line of a program, and its function."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def main_stack() -> list[Place]:
    """Return the calls of the main thread, innermost first, up to 100."""
    ident = threading.main_thread().ident or 0
    stacks = _all_stacks().split("hread 0x")  # "Thread" or "Current thread"
    mine = next((stack for stack in stacks if stack.startswith(f"{ident:016x}")), "")
    return [Place(*found.groups()) for line in mine.splitlines() if (found := _LINE.match(line))]


def _all_stacks() -> str:
    with _lock:
        file = _scratch_file()
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(file, all_threads=True)
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


@functools.cache
def _scratch_file() -> int:
    # Not a pipe or a disk, either of which may be full.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stacks")
    import tempfile  # not needed on Linux

    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file
