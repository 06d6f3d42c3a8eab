"""Keep a dead rank's files open for a moment, so that the others can still say which one it was.

MPICH's ``mpiexec`` ends all output of a job once a rank's files close. On two hosts the message
that names the rank was lost whenever it came 0.15 s late (MPICH 5.0.2); it was never lost on one
host, or with Open MPI 5.0.11, so neither needs this.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

SECONDS_HELD = 0.5
# A rank that ends normally sends a line first.
_SCRIPT = f"read -r line || sleep {SECONDS_HELD}"


def start_hold() -> Hold | None:
    """Start a `Hold` where ``mpiexec`` makes it necessary and a process can be started."""
    manager = _process_manager()
    if manager is None or os.environ.get("MPI_LOCALNRANKS") == os.environ.get("PMI_SIZE"):
        return None
    with contextlib.suppress(OSError):
        return Hold([manager])
    return None


class Hold:
    """A process that shares a rank's standard output and error, and closes them a little later.

    Parameters
    ----------
    descriptors : list of int
        Other files to share.

    Raises
    ------
    OSError
        If no process can be started.
    """

    def __init__(self, descriptors: list[int]) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            bufsize=0,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
        )

    def release(self) -> None:
        """Close the files, as this process is about to."""
        with contextlib.suppress(OSError):  # it has been killed
            self._process.communicate(b"\n")

    def close_in_child(self) -> None:
        """Close a forked child's copy of the pipe whose end shows that the parent is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def _process_manager() -> int | None:
    """Return the connection to the process manager of MPICH; None if there is none."""
    try:
        descriptor = int(os.environ["PMI_FD"])
        os.fstat(descriptor)
    except (KeyError, ValueError, OSError):
        return None
    return descriptor
