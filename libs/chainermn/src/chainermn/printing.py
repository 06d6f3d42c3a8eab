"""Text that standard output cannot show must not end a job."""

from __future__ import annotations

import io
import sys


def escape_unprintable() -> None:
    r"""Let standard output escape characters that its encoding lacks, instead of raising.

    Standard error does so from the start. Without this, a name or a mark that rank 0 prints where
    the encoding is ASCII (``PYTHONIOENCODING=ascii``) would end all ranks. An error handler other
    than Python's defaults stays in use.
    """
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and stdout.errors in ("strict", "surrogateescape"):
        stdout.reconfigure(errors="backslashreplace")
