"""Settings of a timeline: what to record, and where to write it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

#: File to write. If this variable is set, every job records a timeline.
VARIABLE = "CHAINERMN_TIMELINE"
#: If this is 1, timelines include the layers of the model.
LAYERS = "CHAINERMN_TIMELINE_LAYERS"
#: The first and the last iteration to record, as in ``100-120``.
ITERATIONS = "CHAINERMN_TIMELINE_ITERATIONS"


@dataclass(frozen=True)
class Settings:
    """What to record, and where to write it.

    Raises ValueError if the window is not valid.
    """

    path: str
    with_layers: bool = False
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not 1 <= self.window[0] <= self.window[1]:
            raise ValueError(
                "iterations must be the first and the last iteration to record, counted from 1, "
                f"got {self.window}"
            )

    @classmethod
    def from_environment(cls) -> Settings | None:
        """Return the settings from the environment; None if it does not ask for a timeline.

        Raises ValueError if its variables are not valid.
        """
        path = os.environ.get(VARIABLE)
        if not path:
            return None
        iterations = os.environ.get(ITERATIONS, "")
        found = re.fullmatch(r"(\d+)-(\d+)", iterations)
        if iterations and not (found and 1 <= int(found[1]) <= int(found[2])):
            raise ValueError(
                f"{ITERATIONS} must be the first and the last iteration to record, as in 100-120, "
                f"got {iterations!r}"
            )
        window = (int(found[1]), int(found[2])) if found else None
        return cls(path, os.environ.get(LAYERS, "0") not in ("", "0"), window)
