"""Notes about the machine, on standard error.

They are not warnings, so a job that is only slow does not fail where warnings are errors.
"""

from __future__ import annotations

import functools
import sys

_PREFIX = "chainermn: note: "


@functools.cache
def note_once(text: str) -> None:
    """Print a note of one line, unless this process has printed it before."""
    # In one piece, so that notes of other ranks do not mix in.
    print(f"{_PREFIX}{text}\n", end="", file=sys.stderr, flush=True)


def without_notes(output: str) -> str:
    """Return text from standard error without the lines that are notes."""
    lines = output.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_PREFIX))
