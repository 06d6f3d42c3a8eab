"""Rows of the log for people, for files and for pipes; apps/mnist tests it on real terminals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chainermn.extensions import TerminalReport, terminal_report

HERE = Path(__file__).parent


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(HERE)
    import trainers

    def run(watched: bool) -> None:
        monkeypatch.setattr(terminal_report, "is_watched", lambda: watched)
        trainer = trainers.make_trainer(tmp_path, 2)
        trainer.extend(TerminalReport(["epoch", "loss"], update_interval=1))
        trainer.run()

    return run


def test_plain_lines_for_a_pipe(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [["epoch", "loss"], ["1", "1"], ["2", "1"]]


def test_bar_below_the_rows_on_a_terminal(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(True)
    shown = capsys.readouterr().out
    assert "total [" in shown
    assert "6 iter, 2 epoch / 2 epochs" in shown
    assert shown.count("epoch       loss") == 1
