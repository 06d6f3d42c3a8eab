"""Processes beside a rank, which go on when it is stuck in C code or dead.

They have to be there soon, and to leave the cores to the ranks: so they import of all packages
only this one, and run without the site directories.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# This package and the one that it is in, without what their __init__.py would import.
_PACKAGES = [
    ("chainermn", str(Path(__file__).parents[1])),
    ("chainermn.failures", str(Path(__file__).parent)),
]
_BOOT = f"""
import json, os, sys
try:
    with open("/proc/self/comm", "w") as name:
        name.write("chainermn-{{module}}")
except OSError:
    pass  # not Linux
for package, folder in {_PACKAGES}:
    sys.modules[package] = type(sys)(package)
    sys.modules[package].__path__ = [folder]
from chainermn.failures import {{module}}
arguments = sys.stdin.read()
if arguments:  # otherwise the rank has ended meanwhile
    {{module}}.main(**json.loads(arguments))
os._exit(0)  # without clearing up
"""


def start_helper(
    module: str, arguments: dict[str, Any], descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Run ``main(**arguments)`` of a module of this package in a process and session of its own.

    What ends the processes of a rank leaves it alone. It writes to the standard error of the rank,
    and mpiexec waits until it has ended.

    Parameters
    ----------
    module : str
    arguments : dict
        Anything that JSON can say.
    descriptors : sequence of int
        File descriptors that the helper gets, under the same numbers.

    Raises
    ------
    OSError
        If no process can be started.
    """
    helper = subprocess.Popen(
        [sys.executable, "-E", "-s", "-S", "-c", _BOOT.format(module=module)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
    )
    assert helper.stdin is not None
    with helper.stdin as stream:
        stream.write(json.dumps(arguments).encode())
    return helper
