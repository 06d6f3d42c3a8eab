"""Run ``mpiexec`` to its end, restart it if it fails, and pass signals on to it."""

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

#: The exit code of training that `StopOnSignal` has stopped: it makes room for something else.
STOPPED = os.EX_TEMPFAIL
# How long mpiexec may take to obey a signal before it gets a stronger one.
_PATIENCE = 5.0


def run_to_end(command: Sequence[str], environment: Mapping[str, str], max_restarts: int) -> int:
    """Run a command until it succeeds, has failed too often, or is ended by a signal.

    Returns its exit code as in a shell: 128 plus the number of the signal, if one killed it.
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
    """Tell the user something in one line."""
    click.echo(f"chainermn launch: {message}", err=True)


class SignalsToChild:
    """Pass signals on to the process that it runs, and upon SIGINT and SIGTERM make sure it ends.

    SIGUSR1 asks training to stop by itself; if none runs, there is nothing to be started any more.
    """

    def __init__(self) -> None:
        self.received = False
        #: The exit code that the signal makes; `STOPPED` after SIGUSR1 if no process ran.
        self.code = 0
        self._process: subprocess.Popen[bytes] | None = None
        # Whether a signal has come while there was no process, or one was being started.
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
        """Run a process to its end; return its exit code as in a shell."""
        return self.wait(self.start(command, environment))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process, which gets the signals from now on; one that has come ends it."""
        self._process = process = subprocess.Popen(command, env=environment, **options)
        if self._is_too_early:
            process.terminate()
            _insist_on_end(process)
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process; return its exit code as in a shell."""
        code = process.wait()
        # From here on, signals are too early for the next one.
        is_doomed, self._process = self._is_too_early, None
        if is_doomed:
            return self.code
        return code if code >= 0 else 128 - code

    def pause(self, seconds: float) -> bool:
        """Sleep, but not on after a signal; tell whether none has come."""
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
            # A terminal also interrupts mpiexec itself, for which a second interrupt means more.
            if number != signal.SIGINT or not _in_foreground():
                process.send_signal(number)
            _insist_on_end(process)


def _insist_on_end(process: subprocess.Popen[bytes]) -> None:
    """Send a process stronger signals after a while: ranks in an MPI call see no interrupt."""
    for patience, stronger in ((1, signal.SIGTERM), (2, signal.SIGKILL)):
        timer = threading.Timer(patience * _PATIENCE, process.send_signal, [stronger])
        timer.daemon = True
        timer.start()


def _in_foreground() -> bool:
    """Tell whether a terminal sends its signals to this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)
