"""Waiting for a limited time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chainermn.process.patience import AwakeClock, run_patiently, wait_patiently


def test_waits_for_so_many_seconds_in_all() -> None:
    waits: list[float] = []
    assert not wait_patiently(waits.append, 2.5)
    assert waits == [1, 1, 0.5]
    assert not wait_patiently(waits.append, 2)
    assert waits[3:] == [1, 1]


def test_returns_what_has_come() -> None:
    results = iter([[], ["late"]])
    assert wait_patiently(lambda seconds: next(results), 60) == ["late"]
    assert wait_patiently(lambda seconds: seconds, 0.5) == 0.5


def test_what_a_program_printed() -> None:
    code = "import sys; print(input()); sys.exit('no')"
    done = run_patiently([sys.executable, "-c", code], 60, "given", errors="replace")
    assert (done.returncode, done.stdout, done.stderr) == (1, "given\n", "no\n")


def test_program_that_takes_longer_than_one_wait() -> None:
    done = run_patiently(["sh", "-c", "sleep 1.2; echo late"], 60)
    assert (done.returncode, done.stdout) == (0, "late\n")


def test_program_that_does_not_end() -> None:
    with pytest.raises(subprocess.TimeoutExpired, match="timed out after 0\\.1 seconds"):
        run_patiently(["sleep", "600"], 0.1)


def test_program_ends_with_whoever_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):  # which otherwise would wait for ten minutes
        run_patiently(["sleep", "600"], 600)


def test_clock_leaves_out_the_time_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0, 101.0, 5000.0, 5000.5])
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    clock = AwakeClock(longest_step=2.0)
    assert [clock.read(), clock.read(), clock.read()] == [1.0, 3.0, 3.5]
