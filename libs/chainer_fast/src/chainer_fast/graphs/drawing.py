"""Random numbers for steps that may be recorded: a function of a seed and a count.

What cuRAND draws depends on how often it was called, which the host counts; a recorded step would
draw the same numbers each time. So steps with CUDA graphs draw by counting, as in Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011. Seed and count lie in GPU memory, and are
written before each step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_of_thread = threading.local()


class Draws:
    """The random numbers of a step.

    Attributes
    ----------
    key : array of uint64, shape (2,)
        Seed, and number of steps since it was set; in GPU memory.
    n_calls : int
        Number of calls so far in the step.
    """

    def __init__(self, key: Any) -> None:
        self.key = key
        self.n_calls = 0

    def next_call(self) -> int:
        """Return the number of this call in the step, so that each call draws other numbers."""
        self.n_calls += 1
        return self.n_calls - 1

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Begin a step: functions in the ``with`` block, on this thread, draw from here."""
        self.n_calls = 0
        before, _of_thread.draws = draws(), self
        try:
            yield
        finally:
            _of_thread.draws = before


def draws() -> Draws | None:
    """Return the random numbers of this thread's step; None if the step cannot be recorded."""
    return getattr(_of_thread, "draws", None)
