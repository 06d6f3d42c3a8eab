"""What ranks take over from the caller besides the function."""

from __future__ import annotations

import linecache
import os
import sys
from typing import NamedTuple


class Surroundings(NamedTuple):
    """Where modules are found, and the lines that tracebacks show of what is in no file."""

    path: list[str]
    #: By name; those of a notebook's cells.
    sources: dict[str, list[str]]

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process."""
        shown = {name: linecache.getlines(name) for name in linecache.cache}
        return cls(sys.path, {name: shown[name] for name in shown if not os.path.exists(name)})

    def take_over(self) -> None:
        """Make them those of this process."""
        sys.path[:] = [*self.path, *(folder for folder in sys.path if folder not in self.path)]
        for name, lines in self.sources.items():
            # Without a time, no file is looked for.
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
