"""Print the output of ranks line by line, each after its rank."""

from __future__ import annotations

import sys


class Output:
    """Passes one stream of one rank on to ``sys.stdout`` or ``sys.stderr``.

    Notebooks and pytest replace these streams, so each write looks them up.
    """

    def __init__(self, rank: int, stream: str) -> None:
        self._prefix = f"[rank {rank}] "
        self._stream = stream
        self._rest = bytearray()

    def write(self, data: bytes) -> None:
        """Print the lines that are now complete."""
        lines, end, rest = data.rpartition(b"\n")
        if end:
            self._print((self._rest + lines).split(b"\n"))
            self._rest.clear()
        self._rest += rest

    def close(self) -> None:
        """Print a last line that lacks its newline."""
        if self._rest:
            self._print([self._rest])
            self._rest.clear()

    def _print(self, lines: list[bytearray]) -> None:
        stream = getattr(sys, self._stream)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        for line in lines:
            text = f"{self._prefix}{line.decode(errors='replace')}\n"
            stream.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
        stream.flush()
