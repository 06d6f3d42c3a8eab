"""Start ``mpiexec``, and leave none of its processes behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from chainermn.process.processes import inheriting

#: Seconds that mpiexec gets to end its ranks on all hosts, and then its daemons to end.
PATIENCE = 3.0


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], mark: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; in the end, end it and all processes here that inherited a variable.

    All output comes through one pipe. ``mark`` names the variable, whose value must be unique.
    """
    try:
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal reaches only the caller
        ) as process:
            try:
                yield process
            finally:
                with _interrupts_ignored():
                    process.terminate()  # mpiexec tidies up on SIGTERM
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(PATIENCE)
                    process.kill()
    finally:
        with _interrupts_ignored():
            end_marked(mark, environment[mark])


def end_marked(name: str, value: str) -> None:
    """Wait for all processes here that inherited a variable to end; kill those that do not."""
    deadline = time.monotonic() + PATIENCE
    # Processes stuck in the kernel cannot be killed, so this gives up on them.
    while (strays := inheriting(name, value)) and time.monotonic() < deadline + PATIENCE:
        if time.monotonic() > deadline:
            for stray in strays:
                stray.kill()
        time.sleep(0.02)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore interrupts, so that pressing Ctrl-C twice does not keep the job from ending."""
    is_main = threading.current_thread() is threading.main_thread()
    # None is a handler set by C code, which Python cannot restore.
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
