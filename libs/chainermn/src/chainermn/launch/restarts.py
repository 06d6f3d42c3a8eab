"""Run ``mpiexec``, restart it if it fails, and pass signals on to it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import click

#: Exit code of a training run that `StopOnSignal` stopped, which should not be restarted now.
STOPPED = os.EX_TEMPFAIL
#: Seconds that mpiexec gets to obey a signal before it gets a stronger one.
PATIENCE = 5.0


def run_to_end(command: Sequence[str], environment: Mapping[str, str], max_restarts: int) -> int:
    """Run a command until it succeeds, fails too often, or is ended by a signal.

    Returns its exit code as a shell does: 128 plus the signal's number if a signal killed it.
    """
    with SignalsToChild() as signals:
        attempt = 1
        while (code := signals.run(command, environment)) and not signals.received:
            if code == STOPPED or attempt > max_restarts:
                break
            number = f"attempt {attempt} of {max_restarts + 1}"
            say(f"{number} ended with exit code {code}; starting again")
            attempt += 1
        return code


def say(message: str) -> None:
    """Print a one-line message for the user."""
    click.echo(f"chainermn launch: {message}", err=True)


class SignalsToChild:
    """Passes signals on to a child process, and makes sure that SIGINT and SIGTERM end it.

    SIGUSR1 asks training to stop by itself. If no process is running, it prevents the next start.
    """

    def __init__(self) -> None:
        self.received = False
        #: Exit code for the signal received; `STOPPED` after SIGUSR1 if no process was running.
        self.code = 0
        self._process: subprocess.Popen[bytes] | None = None
        # Whether a signal came while no process was running or while one was starting.
        self._is_too_early = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> SignalsToChild:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a process until it ends; return its exit code as a shell does."""
        return self.wait(self.start(command, environment))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process that gets all signals from now on; end it if one has already come."""
        self._process = process = subprocess.Popen(command, env=environment)
        if self._is_too_early:
            process.terminate()
            _insist_on_end(process)
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a process to end; return its exit code as a shell does."""
        code = process.wait()
        # From here on, a signal is too early for the next process.
        is_doomed, self._process = self._is_too_early, None
        if is_doomed:
            return self.code
        return code if code >= 0 else 128 - code

    def pause(self, seconds: float) -> bool:
        """Sleep until the time is up or a signal comes; return False after a signal."""
        end = time.monotonic() + seconds
        while not self.received and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
        return not self.received

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        process = self._process
        is_request = number == signal.SIGUSR1
        if is_request and process is not None and process.poll() is None:
            process.send_signal(number)
            return
        self.received, self.code = True, STOPPED if is_request else 128 + number
        if process is None:
            self._is_too_early = True
        elif not is_request:
            # A terminal also interrupts mpiexec itself, which reacts differently to a second one.
            if number != signal.SIGINT or not in_foreground():
                process.send_signal(number)
            _insist_on_end(process)


def _insist_on_end(process: subprocess.Popen[bytes]) -> None:
    """Send a process stronger signals after a while: ranks inside an MPI call ignore SIGINT."""
    for patience, stronger in ((1, signal.SIGTERM), (2, signal.SIGKILL)):
        timer = threading.Timer(patience * PATIENCE, process.send_signal, [stronger])
        timer.daemon = True
        timer.start()


def in_foreground() -> bool:
    """Tell whether a terminal sends its signals to this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)
