"""Start processes that keep running when their rank is stuck in C code or dead."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chainermn.process.processes import HELPERS

# Slurm sends these to every process of a job, and ranks may then continue until they have saved
# their work.
_FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_ROOT = str(Path(__file__).parents[2])
# Imports a module without running the __init__.py of its package and of chainermn.
_BOOT = f"""
import json, os, sys
try:
    with open("/proc/self/comm", "w") as name:
        name.write("{HELPERS}{{module}}")
except OSError:
    pass  # not Linux
for package in ("chainermn", "{{package}}"):
    sys.modules[package] = type(sys)(package)
    sys.modules[package].__path__ = [os.path.join({_ROOT!r}, *package.split("."))]
from {{package}} import {{module}}
arguments = sys.stdin.read()
if arguments:  # otherwise the rank has ended
    {{module}}.main(**json.loads(arguments))
os._exit(0)  # without cleaning up
"""


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
    skips the site directories, to start fast and to leave the cores to the ranks.
    """
    package, _, name = module.rpartition(".")
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)  # the helper inherits it
    try:
        helper = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", "-c", _BOOT.format(package=package, module=name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=leaves_group,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    assert helper.stdin is not None
    with helper.stdin as stream:
        stream.write(json.dumps(arguments).encode())
    return helper


def start_shell(script: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Run a shell script, which does not need Python's files, since the network may be down."""
    command = ["/bin/sh", "-c", script, "sh", *arguments]
    return subprocess.Popen(command, cwd="/", env={"PATH": "/usr/bin:/bin"}, **options)
