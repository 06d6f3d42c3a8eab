"""Print the log where people watch, and where nobody does."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import chainer
from chainer.training.extensions import PrintReport
from rich.console import Console, RenderableType

from chainermn.extensions.live_view import EFFICIENCY, SLOWEST, State, rows, view
from chainermn.extensions.throughput import minutes_left, share_done
from chainermn.progress import is_watched, terminal_size

_ERASE_BELOW = "\033[J"
_UP = "\033[{}A"
_ROOM = 3  # empty lines for what others print between two drawings: a warning has two or three
#: Seconds between two drawings, and the share of the time that drawing may take, at most.
_INTERVAL, _SHARE = 0.25, 0.01


class TerminalReport(PrintReport):
    """Prints a row for each entry of the log; on a terminal, a live view of the training.

    The live view has the last rows that fit, the latest values of the columns, bars of the
    training and of the epoch, the speed of `Throughput`, the time left, and what a
    ``DistributedReport`` says in the log. It is drawn at most four times a second, and takes at
    most a hundredth of the time. In the end all rows are left.

    A file or pipe gets plain lines, without bars and escape sequences. Under ``mpiexec`` it is
    the output of ``mpiexec`` that counts.

    Use it on one rank, after Chainer's ``LogReport``:
    ``if comm.rank == 0: trainer.extend(TerminalReport(['epoch', 'main/loss']))``.

    Parameters
    ----------
    columns : sequence of str
        Entries of the log.
    update_interval : int
        Iterations between two drawings, at least.
    """

    trigger = 1, "iteration"
    priority = 90  # after LogReport

    def __init__(self, columns: Sequence[str], update_interval: int = 1) -> None:
        super().__init__(list(columns), out=PlainOutput())
        self._columns, self._update_interval = list(columns), update_interval
        console = Console(force_terminal=True, highlight=False, markup=False, emoji=False)
        is_live = is_watched() and not console.is_dumb_terminal
        self._drawing = Drawing(console) if is_live else None
        self._trainer: chainer.training.Trainer | None = None
        self._due = 0.0

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Print or draw what is new."""
        if self._drawing is None:
            super().__call__(trainer)
            return
        self._trainer = trainer
        if (
            trainer.updater.iteration % self._update_interval == 0
            and time.monotonic() >= self._due
        ):
            begin = time.thread_time()  # other programs may have the core meanwhile
            size = terminal_size()
            self._drawing.replace(self.view(trainer, size.columns, size.lines), *size)
            cost = time.thread_time() - begin
            self._due = time.monotonic() + max(_INTERVAL, cost / _SHARE)

    def finalize(self) -> None:
        """Leave all rows of the log, without what was below."""
        if self._drawing is not None and self._trainer is not None:
            log = self._trainer.get_extension("LogReport").log
            columns, _ = terminal_size()
            self._drawing.end(rows(self._columns, log, columns), columns)
            self._trainer = None

    def view(self, trainer: chainer.training.Trainer, columns: int, lines: int) -> RenderableType:
        """Return what a terminal of so many columns and lines shows now."""
        return view(self._columns, _state_of(trainer, self._columns), columns, lines)


class Drawing:
    """Takes the place of itself, below all that is printed.

    Meanwhile the cursor waits at the first of a few empty lines above it. Text that other ranks
    print on the same terminal, such as warnings, appears there and stays above the next drawing.
    Rich's ``Live`` waits at the last line: it would take that text for lines of its own, and erase
    it. It also hides the cursor, and a rank that is killed could not show it again.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def replace(self, content: RenderableType, columns: int, lines: int) -> None:
        """Draw, and wait for the next drawing; what does not fit is left out at the top."""
        # Open MPI passes on whole lines only, so what is written ends with one: the cursor goes up
        # to the line above the drawing, and down again.
        room = max(0, min(_ROOM, lines - 3))
        fit = max(1, lines - room - 2)
        shown = self._render(content, columns).splitlines(keepends=True)[-fit:]
        up = _UP.format(room + len(shown) + 1)
        self._write("\n" * room + "".join(shown) + up + "\n")

    def end(self, content: RenderableType, columns: int) -> None:
        """Draw for the last time, and go on below."""
        self._write(self._render(content, columns))

    def _render(self, content: RenderableType, columns: int) -> str:
        self._console.size = columns, 1
        with self._console.capture() as captured:
            self._console.print(content)
        return captured.get()

    def _write(self, text: str) -> None:
        # At once: it may go through the pipe of mpiexec, in between what others print.
        sys.stdout.write(_ERASE_BELOW + text)
        sys.stdout.flush()


class PlainOutput:
    """Standard output without the escape sequence that PrintReport puts before each row."""

    def write(self, text: str) -> None:
        """Print the text."""
        sys.stdout.write(text.replace(_ERASE_BELOW, ""))

    def flush(self) -> None:
        """Let it be seen."""
        sys.stdout.flush()


def _state_of(trainer: chainer.training.Trainer, columns: Sequence[str]) -> State:
    updater = trainer.updater
    # Nothing else, since each value may have to come from a GPU.
    shown = {*columns, EFFICIENCY, SLOWEST} & trainer.observation.keys()
    latest = {name: _number(trainer.observation[name]) for name in shown}
    # The last batch of an epoch may have examples of the next one.
    latest["epoch"] = updater.epoch if updater.is_new_epoch else updater.epoch_detail
    latest["iteration"] = updater.iteration
    latest["elapsed_time"] = trainer.elapsed_time
    log = trainer.get_extension("LogReport").log
    return State(log, latest, _speed_of(trainer), share_done(trainer), minutes_left(trainer))


def _number(value: Any) -> float:
    return float(getattr(value, "array", value))


def _speed_of(trainer: chainer.training.Trainer) -> dict[str, float]:
    try:
        throughput = trainer.get_extension("Throughput")
    except ValueError:  # there is none
        return {"iterations/s": trainer.updater.iteration / trainer.elapsed_time}
    reported = {name: value for name, value in trainer.observation.items() if name[-2:] == "/s"}
    return throughput.speed() or reported
