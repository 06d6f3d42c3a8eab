"""Start processes that keep running when their rank is stuck in C code or dead."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chainermn.process.processes import HELPERS
from chainermn.process.streams import has_standard_error

# Slurm sends these to every process of a job, and ranks may then continue until they have saved
# their work.
_FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# A system may lack processes or memory for a moment.
_ATTEMPTS, _SECONDS_BETWEEN = 3, 0.1

_ROOT = str(Path(__file__).parents[2])

# Imports a module without running the __init__.py of its package and of chainermn.
_BOOT = """
import os, sys
root, title, package, module = sys.argv[1:]
try:
    with open("/proc/self/comm", "w") as name:
        name.write(title)
except OSError:
    pass  # not Linux
for each in ("chainermn", package):
    sys.modules[each] = type(sys)(each)
    sys.modules[each].__path__ = [os.path.join(root, *each.split("."))]
try:
    import json
    main = __import__(f"{package}.{module}", fromlist=["main"]).main
    arguments = sys.stdin.read()
    if arguments:  # otherwise the rank has ended
        main(**json.loads(arguments))
except Exception as error:
    import traceback
    *_, at = traceback.extract_tb(error.__traceback__)
    what = f"{type(error).__name__}: {error}, at {at.filename}:{at.lineno}"
    os.write(2, f"chainermn: {title} failed: {what}\\n".encode(errors="replace"))
    os._exit(1)
os._exit(0)  # without cleaning up
"""


class HelperError(OSError):
    """Raised if a helper cannot be started, or if it always ends too soon."""


def start_helper(
    module: str,
    arguments: dict[str, Any],
    descriptors: Sequence[int] = (),
    *,
    leaves_group: bool = True,
) -> subprocess.Popen[bytes]:
    """Run ``main(**arguments)`` of a module of this library in a new process and session.

    Signals to the rank's process group do not reach the helper, unless it leaves the group itself,
    with ``leaves_group=False``. Of the signals to all processes of the job, it only reacts to
    SIGKILL and SIGINT. It shares the rank's standard error, so mpiexec
    waits for it to end, and it inherits the file descriptors. It imports only this library and
    skips the site directories, to start fast and to leave the cores to the ranks, and the working
    folder, where a file may have the name of a module. If it fails, it prints one line.

    Raises `HelperError` if the system starts no process.
    """
    package, _, name = module.rpartition(".")
    title = f"{HELPERS}{name}"
    command = [sys.executable, "-I", "-S", "-c", _BOOT, _ROOT, title, package, name]
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)  # the helper inherits it
    try:
        for attempt in range(_ATTEMPTS):
            time.sleep(_SECONDS_BETWEEN * bool(attempt))
            try:
                helper = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=None if has_standard_error() else subprocess.DEVNULL,
                    pass_fds=descriptors,
                    start_new_session=leaves_group,
                )
                break
            except OSError as error:
                failure = error
        else:
            raise HelperError(failure.errno, f"cannot start {title}: {failure.strerror}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    assert helper.stdin is not None
    with contextlib.suppress(BrokenPipeError), helper.stdin as stream:  # it has failed already
        stream.write(json.dumps(arguments).encode())
    return helper


def end_of(helper: subprocess.Popen[bytes], seconds: float = 0.0) -> str:
    """Return the end of the sentence "it has ...", such as "ended with exit code 1".

    That is empty if the helper is still running, even ``seconds`` later.
    """
    try:
        code = helper.wait(seconds)
    except subprocess.TimeoutExpired:
        return ""
    if code < 0:
        return f"been killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def start_shell(script: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Run a shell script, which does not need Python's files, since the network may be down."""
    command = ["/bin/sh", "-c", script, "sh", *arguments]
    return subprocess.Popen(command, cwd="/", env={"PATH": "/usr/bin:/bin"}, **options)
