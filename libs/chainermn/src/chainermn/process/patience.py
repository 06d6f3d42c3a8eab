"""Measure time, and wait for a limited time, while this process and its machine run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypeVar

Result = TypeVar("Result")

_LONGEST_WAIT = 1.0


class AwakeClock:
    """Counts seconds, except while this process is stopped or its host sleeps.

    A process that wakes up must not mistake its own sleep for the silence of others. Any time
    beyond ``longest_step`` seconds between two readings counts as sleep.
    """

    def __init__(self, longest_step: float) -> None:
        self._longest_step = longest_step
        self._read_at = time.monotonic()
        self._seconds = 0.0

    def read(self) -> float:
        """Return the time. One thread must call this at least every ``longest_step`` seconds."""
        now = time.monotonic()
        self._seconds += min(now - self._read_at, self._longest_step)
        self._read_at = now
        return self._seconds


def wait_patiently(wait: Callable[[float], Result], seconds: float) -> Result:
    """Call ``wait`` with at most a second until it returns something true, or time is up.

    Virtual machines and laptops are suspended for minutes. Afterwards it looks as if a call had
    taken that long, so each one counts only as what it was asked to wait.

    Parameters
    ----------
    wait : callable
        Waits for at most the given number of seconds; returns something false if nothing came.
    seconds : float
        How long to wait in all; at least one call is made.

    Returns
    -------
    object
        The last result of ``wait``.
    """
    while not (found := wait(min(seconds, _LONGEST_WAIT))) and seconds > _LONGEST_WAIT:
        seconds -= _LONGEST_WAIT
    return found


def run_patiently(
    command: Sequence[str | PathLike[str]], seconds: float, text: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program for a limited time, as `wait_patiently` counts it, and return what it printed.

    Parameters
    ----------
    command : sequence of str or path
        The program and its arguments.
    seconds : float
        How long it may run before it is killed.
    text : str
        What it reads from its standard input.
    **options
        Given to `subprocess.Popen`.

    Returns
    -------
    subprocess.CompletedProcess
        With the exit code and, as text, both outputs.

    Raises
    ------
    OSError
        If it cannot be started.
    subprocess.TimeoutExpired
        If it has been killed.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options
    ) as process:
        unsent = [text]

        def printed(most: float) -> tuple[str, str] | None:
            try:
                return process.communicate(unsent.pop() if unsent else None, most)
            except subprocess.TimeoutExpired:
                return None

        try:
            output = wait_patiently(printed, seconds)
        finally:
            process.kill()  # does nothing to a process that has ended
        if output is None:
            raise subprocess.TimeoutExpired(command, seconds)
    return subprocess.CompletedProcess(command, process.returncode, *output)
