"""What is in front of the user: a terminal, or a file or pipe."""

import os
import sys
from pathlib import Path

CLEAR_BELOW = "\033[J"


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


class PlainOutput:
    """Standard output without the escape sequence that PrintReport puts before each row."""

    def write(self, text: str) -> None:
        """Print the text."""
        sys.stdout.write(text.replace(CLEAR_BELOW, ""))

    def flush(self) -> None:
        """Let it be seen."""
        sys.stdout.flush()


class Progress:
    """A bar on a terminal; nothing elsewhere.

    Parameters
    ----------
    total : int
        Of whatever is counted.
    what : str
        Is being done.
    """

    WIDTH = 40

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.shown = max(total, 1), what, -1
        self.watched = is_watched()

    def to(self, done: int) -> None:
        """Show that so much has been done."""
        percent = 100 * done // self.total
        if self.watched and percent != self.shown:
            bar = "#" * (percent * self.WIDTH // 100)
            end = "\n" if percent == 100 else ""
            print(f"\r{self.what} [{bar:.<{self.WIDTH}}] {percent} %", end=end, flush=True)
            self.shown = percent
