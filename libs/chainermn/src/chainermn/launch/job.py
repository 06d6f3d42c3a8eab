"""An ``mpiexec`` of which no process is left in the end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from chainermn.failures.processes import inheriting

# Seconds for mpiexec to end its ranks, on all hosts, and then for its daemons to end.
_PATIENCE = 3.0


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], mark: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, and end it and all processes on this host that have inherited a variable.

    What it prints comes by one pipe. ``mark`` is the name of the variable, whose value is unique.
    """
    try:
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal is for the caller alone
        ) as process:
            try:
                yield process
            finally:
                with _interrupts_ignored():
                    process.terminate()  # upon which it tidies up
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_PATIENCE)
                    process.kill()
    finally:
        with _interrupts_ignored():
            end_marked(mark, environment[mark])


def end_marked(name: str, value: str) -> None:
    """Wait for the end of all processes here that have inherited a variable; kill those left."""
    deadline = time.monotonic() + _PATIENCE
    # What the kernel holds cannot be killed.
    while (strays := inheriting(name, value)) and time.monotonic() < deadline + _PATIENCE:
        if time.monotonic() > deadline:
            for stray in strays:
                stray.kill()
        time.sleep(0.02)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let nobody who presses Ctrl-C twice keep the job from ending."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:  # set by C code: no way back to it
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
