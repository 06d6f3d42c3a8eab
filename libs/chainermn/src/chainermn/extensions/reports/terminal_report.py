"""Print the log: as a live view on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import chainer
from chainer.training.extensions import PrintReport
from rich.console import Console, RenderableType

from chainermn.extensions.reports.live_view import EFFICIENCY, SLOWEST, State, rows, view
from chainermn.extensions.reports.throughput import minutes_left, share_done
from chainermn.progress import is_watched, terminal_size

_ERASE_BELOW = "\033[J"
_UP = "\033[{}A"
_ROOM = 3  # empty lines for output of others between two drawings; a warning has two or three
#: Seconds between two drawings, and the fraction of the time that drawing may take, at most.
_INTERVAL, _SHARE = 0.25, 0.01


class TerminalReport(PrintReport):
    """Extension that prints the log: as a live view on a terminal, as plain lines elsewhere.

    The live view has the last rows of the log, the current values, progress bars for the training
    and the epoch, the speed from `Throughput`, the time left, and the values of a
    ``DistributedReport``. It is drawn at most four times per second, and takes at most one
    hundredth of the time. When training ends, all rows remain.

    A file or a pipe gets plain lines, without progress bars and escape sequences. Under
    ``mpiexec``, the output of ``mpiexec`` decides.

    If a rank fails, the message about it appears whole below all earlier text, even if this rank
    was killed while drawing. At most one view, or half of one, remains above it. If all processes
    are killed without a message, the prompt may follow half a line, in its color.

    Use it on one rank, together with Chainer's ``LogReport``.

    Parameters
    ----------
    columns : sequence of str
        Names of the values to print.
    update_interval : int
        Smallest number of iterations between two drawings.

    Examples
    --------
    >>> if comm.rank == 0:
    ...     trainer.extend(training.extensions.LogReport())
    ...     trainer.extend(chainermn.extensions.TerminalReport(["epoch", "main/loss"]))
    >>> trainer.run()
    epoch       main/loss
    1           ...
    2           ...
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
        """Print new rows, or draw the live view."""
        if self._drawing is None:
            super().__call__(trainer)
            return
        self._trainer = trainer
        if (
            trainer.updater.iteration % self._update_interval == 0
            and time.monotonic() >= self._due
        ):
            begin = time.thread_time()  # other programs may use the core in between
            size = terminal_size()
            self._drawing.replace(self.view(trainer, size.columns, size.lines), *size)
            cost = time.thread_time() - begin
            self._due = time.monotonic() + max(_INTERVAL, cost / _SHARE)

    def finalize(self) -> None:
        """Print all rows of the log instead of the live view."""
        if self._drawing is not None and self._trainer is not None:
            log = self._trainer.get_extension("LogReport").log
            columns, _ = terminal_size()
            self._drawing.end(rows(self._columns, log, columns), columns)
            self._trainer = None

    def view(self, trainer: chainer.training.Trainer, columns: int, lines: int) -> RenderableType:
        """Return the live view for a terminal with this many columns and lines."""
        return view(self._columns, _state_of(trainer, self._columns), columns, lines)


class Drawing:
    """A drawing below all other output, which each new drawing replaces.

    In between, the cursor stays at the first of a few empty lines above it. Text that other ranks
    print on the same terminal, such as warnings, appears there and stays above the next drawing.
    Rich's ``Live`` leaves the cursor on the last line, so it would erase such text. It also hides
    the cursor, and a rank that is killed could not show it again.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def replace(self, content: RenderableType, columns: int, lines: int) -> None:
        """Draw; lines that do not fit are left out at the top."""
        # Open MPI only passes on whole lines, so the output ends with a newline: the cursor goes
        # up to the line above the drawing, then down again.
        room = max(0, min(_ROOM, lines - 3))
        fit = max(1, lines - room - 2)
        shown = self._render(content, columns).splitlines(keepends=True)[-fit:]
        up = _UP.format(room + len(shown) + 1)
        self._write("\n" * room + "".join(shown) + up + "\n")

    def end(self, content: RenderableType, columns: int) -> None:
        """Draw for the last time, and leave the cursor below."""
        self._write(self._render(content, columns))

    def _render(self, content: RenderableType, columns: int) -> str:
        self._console.size = columns, 1
        with self._console.capture() as captured:
            self._console.print(content)
        return captured.get()

    def _write(self, text: str) -> None:
        # In one piece, because other ranks may print to the same pipe of mpiexec.
        sys.stdout.write(_ERASE_BELOW + text)
        sys.stdout.flush()


class PlainOutput:
    """Standard output without the escape sequence that PrintReport puts before each row."""

    def write(self, text: str) -> None:
        """Print the text."""
        sys.stdout.write(text.replace(_ERASE_BELOW, ""))

    def flush(self) -> None:
        """Flush standard output."""
        sys.stdout.flush()


def _state_of(trainer: chainer.training.Trainer, columns: Sequence[str]) -> State:
    updater = trainer.updater
    # No other values, because each may have to come from a GPU.
    found = {n: trainer.observation.get(n) for n in (*columns, EFFICIENCY, SLOWEST)}
    latest = {n: float(getattr(v, "array", v)) for n, v in found.items() if v is not None}
    # The last batch of an epoch may contain examples of the next epoch.
    latest["epoch"] = updater.epoch if updater.is_new_epoch else updater.epoch_detail
    latest["iteration"] = updater.iteration
    latest["elapsed_time"] = trainer.elapsed_time
    log = trainer.get_extension("LogReport").log
    return State(log, latest, _speed_of(trainer), share_done(trainer), minutes_left(trainer))


def _speed_of(trainer: chainer.training.Trainer) -> dict[str, float]:
    try:
        throughput = trainer.get_extension("Throughput")
    except ValueError:  # there is none
        return {"iterations/s": trainer.updater.iteration / trainer.elapsed_time}
    reported = {name: value for name, value in trainer.observation.items() if name[-2:] == "/s"}
    return throughput.speed() or reported
