"""Show the progress of a long piece of work, on a terminal and in log files."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["Progress", "is_watched", "silence", "terminal_size"]


def is_watched() -> bool:
    """Tell whether the output of this process appears on a terminal, also under mpiexec.

    ``sys.stdout.isatty()`` does not work under mpiexec: MPICH's mpiexec always gives its ranks a
    pipe, and Open MPI's always a terminal. So this function checks the output of mpiexec itself.

    Examples
    --------
    >>> import sys
    >>> if not chainermn.progress.is_watched():
    ...     print("no colors, no progress bars")
    no colors, no progress bars
    """
    try:
        if os.readlink("/proc/self/fd/1") == os.devnull:
            return False
        return os.readlink(_output()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:  # not Linux
        return sys.stdout.isatty()


def terminal_size() -> os.terminal_size:
    """Return the columns and lines of the terminal that shows the output of this process.

    Without a terminal, return the variables ``COLUMNS`` and ``LINES``, or 80 and 24.

    Examples
    --------
    >>> columns, lines = chainermn.progress.terminal_size()
    >>> columns > 0, lines > 0
    (True, True)
    """
    try:
        terminal = os.open(_output(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # not Linux, or another user's
        return shutil.get_terminal_size()
    try:
        size = os.get_terminal_size(terminal)
    except OSError:  # not a terminal
        return shutil.get_terminal_size()
    finally:
        os.close(terminal)
    return size if min(size) > 0 else shutil.get_terminal_size()


def silence() -> None:
    """Discard standard output from now on, including that of processes started later.

    Use it for an option ``--quiet`` of a script, to hide progress bars and logs. Warnings and
    errors still appear, because they go to standard error.

    Examples
    --------
    >>> chainermn.progress.silence()
    """
    if sys.__stdout__ is None:  # another file may have its number
        return
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _output() -> str:
    """Return the path of the standard output of mpiexec; without mpiexec, of this process."""
    writer = pid = os.getpid()
    while pid > 1:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        if name.partition("(")[2].startswith(("mpiexec", "mpirun", "prterun")):
            writer = pid
        pid = int(rest.split()[1])
    return f"/proc/{writer}/fd/1"


class Progress:
    """A progress bar on a terminal, and a line per tenth of the work elsewhere; for one rank.

    Parameters
    ----------
    total : int
        Number of steps.
    what : str
        Name of the work, such as ``'reading images'``.

    Examples
    --------
    >>> if comm.rank == 0:
    ...     progress = chainermn.progress.Progress(4, "reading images")
    ...     for _ in range(4):
    ...         progress.step()
    reading images: 20%
    reading images: 50%
    reading images: 70%
    reading images: 100%
    """

    _WIDTH = 40

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self._watched, self._drawn = is_watched(), False

    def step(self, n: int = 1) -> None:
        """Count ``n`` steps."""
        before, self.done = self.done, self.done + n
        if self._watched:
            self._draw(before)
        elif 10 * self.done // self.total > 10 * before // self.total:
            print(f"{self.what}: {10 * (10 * self.done // self.total)}%", flush=True)

    def _draw(self, before: int) -> None:
        if 1000 * self.done // self.total == 1000 * before // self.total:
            return
        up = "\033[A" if self._drawn else ""  # because Open MPI only passes on whole lines
        self._drawn = True
        share = self.done / self.total
        bar = "#" * int(share * self._WIDTH)
        print(f"{up}{self.what} [{bar:.<{self._WIDTH}}] {share:.1%}", flush=True)
