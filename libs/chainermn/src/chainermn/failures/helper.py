"""Start processes beside a rank that keep running when it is stuck in C code or dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chainermn.failures.processes import HELPERS

# Slurm sends these to every process of a job, and a rank may go on for long enough to save what it
# has done.
_FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# This package and its parent, without the imports in their __init__.py.
_PACKAGES = [
    ("chainermn", str(Path(__file__).parents[1])),
    ("chainermn.failures", str(Path(__file__).parent)),
]
_BOOT = f"""
import json, os, sys
try:
    with open("/proc/self/comm", "w") as name:
        name.write("{HELPERS}{{module}}")
except OSError:
    pass  # not Linux
for package, folder in {_PACKAGES}:
    sys.modules[package] = type(sys)(package)
    sys.modules[package].__path__ = [folder]
from chainermn.failures import {{module}}
arguments = sys.stdin.read()
if arguments:  # otherwise the rank has ended
    {{module}}.main(**json.loads(arguments))
os._exit(0)  # without cleaning up
"""

# How long files are held after the death of their rank.
SECONDS_HELD = 0.5
# A rank that ends normally sends a line first.
_HOLD = f"read -r line || sleep {SECONDS_HELD}"


def start_helper(
    module: str, arguments: dict[str, Any], descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Run ``main(**arguments)`` of a module of this package in a new process and session.

    Signals to the rank's process group do not reach it, and of those to all processes of the job
    it heeds only SIGKILL and SIGINT. It shares the rank's standard error, so
    mpiexec waits for its end, and it inherits the file descriptors. To start fast and leave the
    cores to the ranks, it imports no package except this one, without the site directories.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)  # the helper inherits it
    try:
        helper = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", "-c", _BOOT.format(module=module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    assert helper.stdin is not None
    with helper.stdin as stream:
        stream.write(json.dumps(arguments).encode())
    return helper


def start_shell(script: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Run a script that needs none of Python's files, which may be on a network disk."""
    command = ["/bin/sh", "-c", script, "sh", *arguments]
    return subprocess.Popen(command, cwd="/", env={"PATH": "/usr/bin:/bin"}, **options)


def start_hold() -> subprocess.Popen[bytes] | None:
    """Keep a dead rank's files open for a moment, so that others can still say which one it was.

    MPICH's ``mpiexec`` ends all output of a job once a rank's files close. On two hosts the
    message that names the rank was lost whenever it came 0.15 s late (MPICH 5.0.2). It was never
    lost on one host, or with Open MPI 5.0.11: there, None is returned.

    The files are released when the process that this returns gets a line.
    """
    if os.environ.get("MPI_LOCALNRANKS") == os.environ.get("PMI_SIZE"):
        return None
    try:
        manager = int(os.environ["PMI_FD"])  # the connection to MPICH's process manager
        os.fstat(manager)
        return start_shell(_HOLD, stdin=subprocess.PIPE, bufsize=0, pass_fds=[manager])
    except (KeyError, ValueError, OSError):
        return None  # not MPICH, or no process can be started
