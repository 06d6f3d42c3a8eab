"""Whether overlap pays, found out by measuring iterations with and without it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

# In which the order of gradients is learned, and memory is touched for the first time.
_ITERATIONS_BEFORE = 3
_ITERATIONS_EACH = 7


class OverlapTrial:
    """Lets every second iteration do without overlap, and compares.

    All ranks are in the same iteration of it.

    Attributes
    ----------
    overlaps : bool
        Whether the iteration at hand is to overlap.
    """

    def __init__(self) -> None:
        self.overlaps = True
        self._n_iterations = 0
        self._spent = 0.0
        self._measured: dict[bool, list[float]] = {True: [], False: []}

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what is done in the ``with`` block: that in which overlap can save time."""
        start = perf_counter()
        try:
            yield
        finally:
            self._spent += perf_counter() - start

    def end_iteration(self) -> None:
        """Go on to the next iteration."""
        if self._n_iterations >= _ITERATIONS_BEFORE:
            self._measured[self.overlaps].append(self._spent)
            self.overlaps = not self.overlaps
        self._n_iterations += 1
        self._spent = 0.0

    @property
    def is_over(self) -> bool:
        """Whether there have been enough iterations."""
        return len(self._measured[False]) == _ITERATIONS_EACH

    @property
    def medians(self) -> tuple[float, float]:
        """Seconds of an iteration with overlap and without, on this rank."""
        return statistics.median(self._measured[True]), statistics.median(self._measured[False])
