"""Rows of the log for people, for files and for pipes."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainer
import pytest
from chainer.training import make_extension
from rich.console import Console

from chainermn.extensions import TerminalReport, Throughput
from chainermn.extensions.reports import live_view, terminal_report
from chainermn.extensions.reports.live_view import State
from chainermn.failures.ending import print_at_once, use_terminal
from chainermn.testing.mpiexec import mpiexec_command
from libs.chainermn.tests.extensions.reports import terminals, trainers

HERE = Path(__file__).parent
ROWS = [["epoch", "loss"], ["1", "1"], ["2", "1"]]  # of two epochs


class Clock:
    """A clock that advances only when a test says so."""

    now = 1.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(terminal_report, "time", clock)
    return clock


@pytest.fixture
def make(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes a trainer with three iterations per epoch and a report."""
    monkeypatch.setattr(terminal_report, "terminal_size", lambda: os.terminal_size((80, 24)))
    monkeypatch.setenv("TERM", "xterm")

    def make(watched: bool, epochs: int = 2, seconds: float = 1, interval: int = 1) -> Any:
        monkeypatch.setattr(terminal_report, "is_watched", lambda: watched)
        trainer = trainers.make_trainer(tmp_path, epochs)
        trainer.extend(TerminalReport(["epoch", "loss"], update_interval=interval))

        @make_extension(priority=400)
        def tick(_: chainer.training.Trainer) -> None:
            clock.now += seconds

        trainer.extend(tick)
        return trainer

    return make


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Callable[[], Any]:
    """Return a function that returns a terminal showing what has been printed.

    It notes what it showed after each drawing.
    """

    class Terminal(terminals.Terminal):
        def __init__(self, columns: int, lines: int) -> None:
            super().__init__(columns, lines)
            self.frames: list[str] = []

        def feed(self, printed: bytes) -> None:
            super().feed(printed)
            self.frames.append("\n".join(self.lines()))

    def look() -> Any:
        terminal = Terminal(80, 24)
        before, *drawings = capsys.readouterr().out.replace("\n", "\r\n").split("\033[J")
        assert before == ""
        for drawing in drawings:
            terminal.feed(b"\033[J" + drawing.encode())
        return terminal

    return look


def cells(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines if line]


def test_plain_lines_for_a_pipe(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make(False).run()
    assert cells(capsys.readouterr().out.splitlines()) == ROWS


def test_terminal_that_knows_no_escape_sequences_gets_plain_lines(
    make: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    make(True).run()
    assert cells(capsys.readouterr().out.splitlines()) == ROWS


def test_view_is_drawn_in_its_own_place_and_leaves_the_rows(make: Any, look: Any) -> None:
    make(True).run()
    terminal = look()
    assert len(terminal.frames) == 6 + 1
    header, row, current, training, epoch, facts = cells(terminal.frames[3].splitlines())
    assert [header, row, current] == [["epoch", "loss"], ["1", "1"], ["1.333", "1"]]
    assert (training[0], training[-1]) == ("training", "66.7%")
    assert (epoch[:2], epoch[-1]) == (["epoch", "2"], "33.3%")
    assert facts[:2] + facts[3:] == ["iteration", "4", "iterations/s", "0:00:00", "left"]
    assert cells(terminal.lines()) == ROWS
    assert terminal.is_sane


@pytest.mark.parametrize(
    ("seconds", "interval", "expected"),
    [(0.1, 1, [1, 4, 7]), (1, 1, [1, 2, 3, 4, 5, 6, 7]), (1, 3, [3, 6])],
)
def test_at_most_four_drawings_a_second(
    seconds: float, interval: int, expected: list[int], make: Any, look: Any
) -> None:
    trainer = make(True, seconds=seconds, interval=interval)
    trainer.stop_trigger = chainer.training.get_trigger((7, "iteration"))
    trainer.run()
    *drawings, _ = look().frames
    assert [int(cells(drawing.splitlines())[-1][1]) for drawing in drawings] == expected


def test_drawing_takes_a_hundredth_of_the_time(
    make: Any, look: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter(range(100))  # a drawing takes a second
    monkeypatch.setattr(clock, "thread_time", lambda: next(costs))
    trainer = make(True, seconds=50)
    trainer.run()
    *drawings, _ = look().frames
    assert [int(cells(drawing.splitlines())[-1][1]) for drawing in drawings] == [1, 3, 5]


def test_batch_that_ends_an_epoch_belongs_to_it(make: Any, look: Any) -> None:
    trainer = make(True, epochs=1)
    trainer.updater.get_iterator("main").batch_size = 4  # of 6 examples
    trainer.run()
    *drawings, _ = look().frames
    epochs = [cells(drawing.splitlines())[-2] for drawing in drawings]
    assert [(*epoch[:2], epoch[-1]) for epoch in epochs] == [
        ("epoch", "1", "66.7%"),
        ("epoch", "1", "100.0%"),
    ]


def test_speed_of_throughput_and_training_of_unknown_length(make: Any, look: Any) -> None:
    trainer = make(True)
    trainer.extend(Throughput("images", 10))
    trainer.stop_trigger = lambda trainer: trainer.updater.iteration == 4
    trainer.run()
    for drawing in look().frames[:-1]:
        *_, epoch, facts = cells(drawing.splitlines())
        assert "training" not in drawing
        assert epoch[0] == "epoch"
        assert facts[3:] == ["images/s"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_rows_are_left_where_an_exception_ends_training(
    kind: type[BaseException], make: Any, look: Any
) -> None:
    trainer = make(True)

    @make_extension(priority=-1)
    def fail(trainer: chainer.training.Trainer) -> None:
        if trainer.updater.iteration == 5:
            raise kind

    trainer.extend(fail)
    with pytest.raises(kind):
        trainer.run(show_loop_exception_msg=False)
    terminal = look()
    assert cells(terminal.lines()) == [["epoch", "loss"], ["1", "1"]]
    assert terminal.is_sane


def test_resumed_training_shows_earlier_rows(make: Any, look: Any, tmp_path: Path) -> None:
    trainer = make(True, 2)
    trainer.run()
    chainer.serializers.save_npz(tmp_path / "snapshot.npz", trainer)
    look()
    trainer = make(True, 3)
    chainer.serializers.load_npz(tmp_path / "snapshot.npz", trainer)
    trainer.run()
    terminal = look()
    assert cells(terminal.frames[0].splitlines())[1:4] == [["1", "1"], ["2", "1"], ["2.333", "1"]]
    assert cells(terminal.lines())[1:] == [["1", "1"], ["2", "1"], ["3", "1"]]


def test_training_that_is_over_already_draws_nothing(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(True)
    trainer.stop_trigger = lambda _: True
    trainer.run()
    assert capsys.readouterr().out == ""


# What terminals of various sizes show

COLUMNS = ["epoch", "main/loss", "validation/main/accuracy", "images/s", "minutes left"]
ROW = {"main/loss": 0.123456, "validation/main/accuracy": 0.9, "images/s": 123456.7}
STATE = State(
    log=[
        {"epoch": n, "iteration": 10 * n, **ROW, "parallel efficiency": 0.934, "slowest rank": 2}
        for n in range(1, 41)
    ],
    latest={"epoch": 40.3, "iteration": 403, "main/loss": float("nan")},
    speed={"images/s": 4321.6},
    done=0.403,
    minutes_left=61.5,
)


def lines_of(width: int, height: int, state: State = STATE) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(live_view.view(COLUMNS, state, width, height))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_view_of_a_wide_terminal() -> None:
    *_, last, current, empty, training, epoch, facts = lines_of(100, 24)
    assert last.split() == ["40", "0.1235", "0.9", "123457"]
    assert current.split() == ["40.3", "nan", "4322", "61.5"]
    assert empty == ""
    assert (training.split()[-1], epoch.split()[:2], epoch.split()[-1]) == (
        "40.3%",
        ["epoch", "41"],
        "30.0%",
    )
    expected = (
        "iteration 403   4322 images/s   parallel efficiency 93%   slowest rank 2   1:01:30 left"
    )
    assert facts == expected


def test_row_of_the_last_iteration_is_no_second_one_of_its_epoch() -> None:
    latest = {"epoch": 40.0, "iteration": 400}
    lines = lines_of(80, 24, State(STATE.log, latest, {}))
    assert [line.split()[0] for line in lines if "0.1235" in line][-1] == "40"
    assert not [line for line in lines if line.startswith("40 ") and "0.1235" not in line]


@pytest.mark.parametrize("height", [3, 4, 5, 6, 12, 24, 100])
@pytest.mark.parametrize("width", [1, 22, 40, 60, 100])
def test_view_fits_in_any_terminal(
    width: int, height: int, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(force_terminal=True, highlight=False)
    drawing = terminal_report.Drawing(console)
    terminal = terminals.Terminal(width, height)
    for _ in range(3):
        drawing.replace(live_view.view(COLUMNS, STATE, width, height), width, height)
        terminal.feed(capsys.readouterr().out.replace("\n", "\r\n").encode())
    lines = terminal.lines()
    assert len(lines) <= height
    if width >= 22 and height >= 24:
        shown = "\n".join(lines)
        assert shown.count("epoch 41") == 1
        assert ("minutes" in shown) == (width >= 60)
        epochs = [int(line.split()[0]) for line in lines if " 0.1235" in line]
        assert len(epochs) >= min(40, height - 14)
        assert epochs == list(range(41 - len(epochs), 41))


# What is left where a rank is killed

MESSAGE = ["chainermn: rank 1 failed", "Traceback", "ValueError"]
WARNING = ["a rank warns,", "in two lines"]


def test_message_and_prompt_after_output_cut_at_any_byte(
    capfd: pytest.CaptureFixture[str],
) -> None:
    width, height = 24, 16  # the first drawing just fits, and the second scrolls

    def printed() -> bytes:
        return "".join(capfd.readouterr()).replace("\n", "\r\n").encode()

    def terminal_with(output: bytes) -> Any:
        terminal = terminals.Terminal(width, height)
        terminal.feed(output)
        return terminal

    use_terminal(True)
    try:
        print_at_once("\n".join(MESSAGE))
    finally:
        use_terminal(False)
    message = printed()

    earlier = [f"line {n}" for n in range(6)]
    before = "\r\n".join([*earlier, ""]).encode()
    drawing = terminal_report.Drawing(Console(force_terminal=True, highlight=False))
    columns = COLUMNS[:2]
    for epoch in (0.3, 0.6, 1):
        if epoch < 1:
            state = State([], {"epoch": epoch, "iteration": 1}, {}, done=epoch / 2)
            drawing.replace(live_view.view(columns, state, width, height), width, height)
        else:
            drawing.end(live_view.rows(columns, STATE.log[:2], width), width)
        drawn = printed()
        whole = "\n".join(filter(None, terminal_with(drawn).lines()))
        for cut in range(len(drawn) + 1):
            terminal = terminal_with(before + drawn[:cut] + message)
            assert terminal.is_sane, drawn[:cut]
            terminal.feed(b"$ ")
            lines = terminal.lines()
            assert lines[: len(earlier)] == earlier, drawn[:cut]
            assert lines[-len(MESSAGE) - 1 :] == [*MESSAGE, "$"], drawn[:cut]
            half = "\n".join(filter(None, lines[len(earlier) : -len(MESSAGE) - 1]))
            assert whole.startswith(half.rstrip("\ufffd")), drawn[:cut]
        before += drawn
        if epoch == 0.3:
            before += "\r\n".join([*WARNING, ""]).encode()
            earlier += WARNING


@pytest.mark.each_mpi
def test_on_the_terminal_of_mpiexec(tmp_path: Path) -> None:
    class Terminal(terminals.Terminal):
        def feed(self, printed: bytes) -> None:
            super().feed(printed)
            if b"in two lines" in self.printed:
                (tmp_path / "warning").touch()
            trainings = self.printed.count(b"iteration 1 ")
            if trainings == 2 and self.printed.endswith(b"A\r\n"):  # a whole drawing
                (tmp_path / "drawing").touch()

    terminal = Terminal(250, 50)
    command = mpiexec_command(2, [HERE / "watched_job.py", tmp_path])
    assert terminal.run(command, tmp_path) != 0
    lines = terminal.lines()
    begin = lines.index("a rank has something to say,")
    assert lines[begin + 1] == "in two lines"
    at = lines.index("epoch       loss")
    assert at > begin
    assert cells(lines[at : at + 5]) == [["epoch", "loss"], *([str(n), "1"] for n in range(1, 5))]
    assert not any("iteration" in line for line in lines[:at])
    message = terminal.printed[terminal.printed.index(b"chainermn: rank 1 of 2 on ") :]
    message = message[: message.index(b"ValueError: wrong\r\n")].decode().splitlines()
    first = lines.index(message[0])
    assert lines[first : first + len(message) + 1] == [*message, "ValueError: wrong"]
    assert terminal.is_sane
