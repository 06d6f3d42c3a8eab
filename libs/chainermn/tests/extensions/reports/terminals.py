"""A pseudo terminal that a command writes to, and the text that it shows."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pyte

from chainermn.testing.mpiexec import direct_environment


class Terminal:
    """A terminal that shows what is ``printed``, as ``pyte`` understands it."""

    def __init__(self, columns: int, lines: int) -> None:
        self._screen = pyte.HistoryScreen(columns, lines, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self.printed = b""

    def feed(self, printed: bytes) -> None:
        """Show what is printed."""
        self.printed += printed
        self._stream.feed(printed)

    def lines(self) -> list[str]:
        """Return all lines up to the last with text, including those that have scrolled off."""
        width = self._screen.columns
        gone = ["".join(line[i].data for i in range(width)) for line in self._screen.history.top]
        return "\n".join(map(str.rstrip, [*gone, *self._screen.display])).rstrip().split("\n")

    @property
    def is_sane(self) -> bool:
        """Whether text would appear as usual, at the start of a line below all other text.

        That is: the cursor is visible, and no color, escape sequence or character is unfinished.
        """
        cursor = self._screen.cursor
        below = "".join(self._screen.display[cursor.y :]).strip()
        is_plain = cursor.attrs == self._screen.default_char
        return not cursor.hidden and is_plain and cursor.x == 0 and not below

    def run(self, command: Sequence[object], cwd: Path, seconds: float = 300) -> int:
        """Run a command on this terminal and return its exit code."""
        ours, its = os.openpty()
        size = struct.pack("HHHH", self._screen.lines, self._screen.columns, 0, 0)
        fcntl.ioctl(its, termios.TIOCSWINSZ, size)
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=cwd,
            env=direct_environment() | {"TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=its,
            stderr=its,
            start_new_session=True,
        )
        os.close(its)
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                if select.select([ours], [], [], 0.5)[0]:
                    try:
                        self.feed(os.read(ours, 65536))
                    except OSError:  # no process has it open anymore
                        break
            return process.wait(timeout=max(0, deadline - time.monotonic()))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            os.close(ours)
