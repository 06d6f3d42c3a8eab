"""Print the log where people watch, and where nobody does."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import chainer
from chainer.training.extensions import PrintReport, ProgressBar

from chainermn.progress import is_watched

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


class PlainOutput:
    """Standard output without the escape sequence that PrintReport puts before each row."""

    def write(self, text: str) -> None:
        """Print the text."""
        sys.stdout.write(text.replace(_CLEAR_BELOW, ""))

    def flush(self) -> None:
        """Let it be seen."""
        sys.stdout.flush()
