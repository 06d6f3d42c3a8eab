"""Keep open what the end of a rank would close, until the others have said that it is gone.

From these files ``mpiexec`` knows that a rank has ended. It then ends all output at once, that of
the ranks which were about to say which one it was included.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

SECONDS_HELD = 0.5
# A line comes from a rank that ends in good order.
_SCRIPT = f"read -r line || sleep {SECONDS_HELD}"


class Hold:
    """Another process that has this one's files, and some tenths of a second longer.

    These are its standard output and error, and its connection to the process manager of MPICH.

    Raises
    ------
    OSError
        If no process can be started.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            pass_fds=_process_manager(),
            bufsize=0,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
        )

    def release(self) -> None:
        """Close the files, as this process is about to."""
        with contextlib.suppress(OSError):  # it has been killed
            self._process.communicate(b"\n")

    def close_in_child(self) -> None:
        """Close a forked child's copy of what tells that the parent has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def _process_manager() -> list[int]:
    try:
        descriptor = int(os.environ["PMI_FD"])
        os.fstat(descriptor)
    except (KeyError, ValueError, OSError):  # another MPI, or started another way
        return []
    return [descriptor]
