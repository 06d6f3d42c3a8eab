"""How a process is run to its end, and the effect of signals meanwhile."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chainermn.launch import restarts
from chainermn.launch.restarts import run_to_end


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, signal.Signals]]:
    """Replace timers; return the signals that a process would get, and after how many seconds."""
    made: list[tuple[float, signal.Signals]] = []

    class Timer(threading.Thread):
        def __init__(self, seconds: float, function: Any, arguments: list[signal.Signals]):
            super().__init__(target=lambda: None)
            if function.__self__.returncode is None:  # the process is still running
                made.append((seconds, *arguments))

    monkeypatch.setattr(restarts.threading, "Timer", Timer)
    return made


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """Return a signal, and check afterwards that its handler is the same as before."""
    before = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    assert signal.signal(request.param, before) == signal.default_int_handler


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def test_exit_codes() -> None:
    assert run_to_end(shell("exit 0"), os.environ, 0) == 0
    assert run_to_end(shell("exit 7"), os.environ, 0) == 7
    assert run_to_end(shell("kill -KILL $$"), os.environ, 0) == 128 + signal.SIGKILL


def receive(*numbers: signal.Signals, once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process signals once it waits for a child that has made the file ``once``."""

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            while not once.exists():
                os.sched_yield()
            for number in numbers:
                os.kill(os.getpid(), number)
            return super().wait(timeout)

    monkeypatch.setattr(restarts.subprocess, "Popen", Popen)


TRAPS = "trap 'exit 5' INT; trap 'exit 6' TERM; touch '{}'; while :; do sleep 0.1; done"


def test_signal_is_passed_on_and_ends_all_attempts(
    number: signal.Signals,
    timers: list[tuple[float, signal.Signals]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(restarts, "in_foreground", lambda: False)
    ready = tmp_path / "ready"
    receive(number, once=ready, monkeypatch=monkeypatch)
    code = run_to_end(shell(TRAPS.format(ready)), os.environ, max_restarts=3)
    assert code == {signal.SIGINT: 5, signal.SIGTERM: 6}[number]
    assert capfd.readouterr().err == ""
    # Signals that would follow if it did not end, the polite one first.
    assert timers == [(5.0, signal.SIGTERM), (10.0, signal.SIGKILL)]


def test_sigusr1_is_passed_on_and_what_stops_then_is_not_restarted(
    timers: list[tuple[float, signal.Signals]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    receive(signal.SIGUSR1, once=ready, monkeypatch=monkeypatch)
    script = f"trap 'exit 75' USR1; touch '{ready}'; while :; do sleep 0.1; done"
    assert run_to_end(shell(script), os.environ, max_restarts=3) == 75
    assert timers == []
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_interrupt_by_a_terminal_is_not_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "in_foreground", lambda: True)
    ready = tmp_path / "ready"
    receive(signal.SIGINT, signal.SIGTERM, once=ready, monkeypatch=monkeypatch)
    assert run_to_end(shell(TRAPS.format(ready)), os.environ, 0) == 6


def test_signal_that_comes_before_the_process(number: signal.Signals) -> None:
    with restarts.SignalsToChild() as signals:
        os.kill(os.getpid(), number)
        assert signals.received
        assert signals.run(["sleep", "600"], os.environ) == 128 + number


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 128 + signal.SIGINT),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGUSR1, restarts.STOPPED),
    ],
)
def test_signal_while_the_process_is_being_started(
    number: signal.Signals,
    code: int,
    attempt: int,
    timers: list[tuple[float, signal.Signals]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            is_last = len(started) + 1 == attempt
            super().__init__(command if is_last else ["false"], **options)
            started.append(self)
            if is_last:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(restarts.subprocess, "Popen", Popen)
    assert run_to_end(["sleep", "600"], os.environ, max_restarts=3) == code
    assert len(started) == attempt
    assert started[-1].returncode == -signal.SIGTERM
    assert timers == [(5.0, signal.SIGTERM), (10.0, signal.SIGKILL)]


# Runs in a new session, where the first terminal opened becomes the session's own.
IN_A_TERMINAL = """
import os, sys
from chainermn.launch.restarts import in_foreground
def answers():
    yield in_foreground()
    os.close(os.open(sys.argv[1], os.O_RDWR))
    yield in_foreground()
    if os.fork() == 0:
        os.setpgid(0, 0)
        os._exit(in_foreground())
    yield bool(os.waitstatus_to_exitcode(os.wait()[1]))
print(*answers())
"""


def test_no_terminal_then_one_and_its_jobs_in_the_background() -> None:
    main, terminal = pty.openpty()
    try:
        shown = subprocess.run(
            [sys.executable, "-c", IN_A_TERMINAL, os.ttyname(terminal)],
            start_new_session=True,
            capture_output=True,
            text=True,
        )
    finally:
        os.close(terminal)
        os.close(main)
    assert (shown.stdout, shown.stderr) == ("False True False\n", "")
