"""Progress: what is printed, and whether anybody is watching."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chainermn import progress
from chainermn.progress import Progress
from libs.chainermn.tests.extensions.reports import terminals


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(("total", "n"), [(40, 1), (40, 8), (3, 1)])
def test_what_is_printed(
    watched: bool,
    total: int,
    n: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "is_watched", lambda: watched)
    reading = Progress(total, "reading")
    for _ in range(total // n):
        reading.step(n)
    shown = capsys.readouterr().out
    if watched:
        *bars, rest = shown.split("\n")  # whole lines, each drawn over the last
        assert [bar.startswith("\033[A") for bar in bars] == [False] + [True] * (total // n - 1)
        assert bars[-1] == f"\033[Areading [{'#' * 40}] 100.0%"
        assert rest == ""
        return
    tenths = {(40, 1): range(10, 101, 10), (40, 8): range(20, 101, 20), (3, 1): (30, 60, 100)}
    assert shown.splitlines() == [f"reading: {share}%" for share in tenths[total, n]]


def test_nobody_watches_the_pipe_of_a_test() -> None:
    assert not progress.is_watched()


def test_size_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "123")
    monkeypatch.setenv("LINES", "45")
    assert progress.terminal_size() == (123, 45)


SILENCED = """
import subprocess, sys
from chainermn.progress import Progress, is_watched, silence, terminal_size

print("watched:", is_watched(), *terminal_size())
silence()
print("nobody")
Progress(1, "reads").step()
subprocess.run(["echo", "this"], check=True)
print("watched:", is_watched(), file=sys.stderr)
"""


def test_nothing_but_errors_is_seen_after_silence(tmp_path: Path) -> None:
    terminal = terminals.Terminal(70, 10)
    assert terminal.run([sys.executable, "-c", SILENCED], tmp_path) == 0
    assert terminal.lines() == ["watched: True 70 10", "watched: False"]
