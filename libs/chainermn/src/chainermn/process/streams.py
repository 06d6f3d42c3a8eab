"""Standard streams that are missing, as in daemons, or cannot show all characters."""

from __future__ import annotations

import io
import os
import sys

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def prepare_streams() -> None:
    """Let this process print what it likes. Call it before anything else opens a file.

    It opens the null device for each standard stream that was closed when this process started.
    Otherwise a socket or a file of data gets the number of the stream, and then whatever C
    libraries and other processes print.

    Standard output then escapes characters that its encoding lacks, as standard error does from
    the start. Otherwise a name or a mark that rank 0 prints where the encoding is ASCII
    (``PYTHONIOENCODING=ascii``) would end all ranks. An error handler other than Python's
    defaults stays in use.
    """
    for number in range(len(_MODES)):
        try:
            os.fstat(number)
        except OSError:
            # Gets the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in _MODES.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and stdout.errors in ("strict", "surrogateescape"):
        stdout.reconfigure(errors="backslashreplace")


def has_standard_error() -> bool:
    """Tell whether descriptor 2 is standard error, and not a file that the script has opened."""
    return sys.__stderr__ is not None
