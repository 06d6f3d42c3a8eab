"""What ranks print, as lines that begin with the rank."""

from __future__ import annotations

import sys


class Output:
    """Passes one stream of one rank on to ``sys.stdout`` or ``sys.stderr``.

    Notebooks and pytest replace these, so they are looked up for each piece.
    """

    def __init__(self, rank: int, stream: str) -> None:
        self._prefix = f"[rank {rank}] "
        self._stream = stream
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Print the lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._print(lines)

    def close(self) -> None:
        """Print what has no end of line."""
        if self._rest:
            self._print([self._rest])
            self._rest = b""

    def _print(self, lines: list[bytes]) -> None:
        stream = getattr(sys, self._stream)
        for line in lines:
            stream.write(f"{self._prefix}{line.decode(errors='replace')}\n")
        stream.flush()
