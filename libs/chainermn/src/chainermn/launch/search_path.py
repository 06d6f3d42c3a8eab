"""Give ranks the caller's search path and the source of its notebook's cells."""

from __future__ import annotations

import linecache
import os
import sys
from typing import NamedTuple


class SearchPath(NamedTuple):
    """A process's module search path, and source lines for tracebacks that are in no file."""

    path: list[str]
    #: Lines by name, such as those of a notebook's cells.
    sources: dict[str, list[str]]

    @classmethod
    def of_this_process(cls) -> SearchPath:
        """Return those of this process."""
        shown = {name: linecache.getlines(name) for name in linecache.cache}
        return cls(sys.path, {name: shown[name] for name in shown if not os.path.exists(name)})

    def apply(self) -> None:
        """Use them in this process."""
        sys.path[:] = [*self.path, *(folder for folder in sys.path if folder not in self.path)]
        for name, lines in self.sources.items():
            # With None as the time, linecache does not look for a file.
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
