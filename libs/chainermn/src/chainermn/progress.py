"""Show how far a long piece of work is, where people watch and where nobody does."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["Progress", "is_watched", "silence", "terminal_size"]


def is_watched() -> bool:
    """Tell whether what this process prints arrives at a terminal.

    ``sys.stdout.isatty()`` cannot tell under mpiexec: MPICH's always gives its ranks a pipe,
    and Open MPI's always a terminal. So it is mpiexec's own output that is looked at.
    """
    try:
        if os.readlink("/proc/self/fd/1") == os.devnull:
            return False
        return os.readlink(_output()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:  # not Linux
        return sys.stdout.isatty()


def terminal_size() -> os.terminal_size:
    """Return the columns and lines of the terminal at which what this process prints arrives.

    ``COLUMNS`` and ``LINES`` where it cannot be asked, or 80 and 24.
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
    """Print nothing to standard output from now on, nor do processes started from now on.

    For scripts with ``--quiet``: what is printed there, and with it every bar, is about progress.
    Warnings and errors go to standard error, and are seen.
    """
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
    """A bar on a terminal; a line for each tenth elsewhere. For one rank.

    Parameters
    ----------
    total : int
        Steps.
    what : str
        A name for the work, such as ``'reading images'``.
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
        up = "\033[A" if self._drawn else ""  # since Open MPI passes on whole lines only
        self._drawn = True
        share = self.done / self.total
        bar = "#" * int(share * self._WIDTH)
        print(f"{up}{self.what} [{bar:.<{self._WIDTH}}] {share:.1%}", flush=True)
