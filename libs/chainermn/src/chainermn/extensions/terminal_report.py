"""Print the log where people watch, and where nobody does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import chainer
from chainer.training.extensions import PrintReport, ProgressBar

_CLEAR_BELOW = "\033[J"


class TerminalReport(PrintReport):
    """Prints a row for each entry of the log; on a terminal, with a progress bar below.

    A file or pipe gets plain lines, without a bar and escape sequences. Under ``mpiexec`` it is
    the output of ``mpiexec`` that counts.

    Use it on one rank, after Chainer's ``LogReport``:
    ``if comm.rank == 0: trainer.extend(TerminalReport(['epoch', 'main/loss']))``.

    Parameters
    ----------
    columns : sequence of str
        Entries of the log.
    update_interval : int
        Iterations between two updates of the bar.
    """

    trigger = 1, "iteration"
    priority = 90  # after LogReport

    def __init__(self, columns: Sequence[str], update_interval: int = 10) -> None:
        watched = is_watched()
        super().__init__(list(columns), out=sys.stdout if watched else PlainOutput())
        self._bar = ProgressBar(update_interval=update_interval) if watched else None

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Print what is new."""
        super().__call__(trainer)
        if self._bar is not None:
            self._bar(trainer)

    def finalize(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.finalize()


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
        sys.stdout.write(text.replace(_CLEAR_BELOW, ""))

    def flush(self) -> None:
        """Let it be seen."""
        sys.stdout.flush()
