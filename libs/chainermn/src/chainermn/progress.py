"""Show how far a long piece of work is, where people watch and where nobody does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["Progress", "is_watched"]


def is_watched() -> bool:
    """Tell whether what this process prints arrives at a terminal.

    ``sys.stdout.isatty()`` cannot tell under mpiexec: MPICH's always gives its ranks a pipe,
    and Open MPI's always a terminal. So it is mpiexec's own output that is looked at.
    """
    writer = pid = os.getpid()
    try:
        while pid > 1:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if name.partition("(")[2].startswith(("mpiexec", "mpirun", "prterun")):
                writer = pid
            pid = int(rest.split()[1])
        return os.readlink(f"/proc/{writer}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:  # not Linux
        return sys.stdout.isatty()


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
        self._watched = is_watched()

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
        share = self.done / self.total
        bar = "#" * int(share * self._WIDTH)
        end = "\n" if self.done == self.total else ""
        print(f"\r{self.what} [{bar:.<{self._WIDTH}}] {share:.1%}", end=end, flush=True)
