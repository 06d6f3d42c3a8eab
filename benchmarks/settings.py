"""How much to measure, and where to say what is being measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.progress import Progress


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes
    ----------
    rounds : int
        Turns that each contestant has.
    quick : bool
        Only see whether all works.
    only : str
        Measure groups alone the titles of which contain this.
    progress : rich.progress.Progress
    """

    rounds: int
    quick: bool
    only: str
    progress: Progress

    def wants(self, title: str) -> bool:
        """Return whether a group of this title is to be measured."""
        return self.only in title

    def seconds(self, usual: float) -> float:
        """Return how long a turn takes."""
        return 0.0 if self.quick else usual

    def teller(self, title: str) -> Callable[[str], None]:
        """Return a function that is given the name of each contestant before its turn."""
        task = self.progress.add_task(title, total=None)

        def tell(name: str) -> None:
            self.progress.update(task, advance=1, description=f"{title}: {name}")

        return tell
