"""How far work is; apps/mnist tests on real terminals whether somebody watches."""

from __future__ import annotations

import pytest

from chainermn import progress
from chainermn.progress import Progress


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
        *_, last = shown.split("\r")
        assert last == f"reading [{'#' * 40}] 100.0%\n"
        assert len(shown.split("\r")) == 1 + total // n
        return
    tenths = {(40, 1): range(10, 101, 10), (40, 8): range(20, 101, 20), (3, 1): (30, 60, 100)}
    assert shown.splitlines() == [f"reading: {share}%" for share in tenths[total, n]]


def test_nobody_watches_the_pipe_of_a_test() -> None:
    assert not progress.is_watched()
