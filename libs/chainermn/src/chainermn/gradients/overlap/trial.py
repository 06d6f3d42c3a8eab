"""Measure whether overlap saves time, in iterations with and without it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

# Not measured: in these the order of gradients is learned and memory is first touched.
_ITERATIONS_BEFORE = 3
_ITERATIONS_EACH = 7


class OverlapTrial:
    """Alternates iterations with and without overlap and compares their times.

    All ranks must be in the same iteration of the trial.

    Attributes
    ----------
    overlaps : bool
        Whether the current iteration uses overlap.
    """

    def __init__(self) -> None:
        self.overlaps = True
        self._n_iterations = 0
        self._spent = 0.0
        self._measured: dict[bool, list[float]] = {True: [], False: []}

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the ``with`` block, in which overlap can save time, to the iteration."""
        start = perf_counter()
        try:
            yield
        finally:
            self._spent += perf_counter() - start

    def end_iteration(self) -> None:
        """Record the time of this iteration, and choose whether the next one uses overlap."""
        if self._n_iterations >= _ITERATIONS_BEFORE:
            self._measured[self.overlaps].append(self._spent)
            self.overlaps = not self.overlaps
        self._n_iterations += 1
        self._spent = 0.0

    @property
    def is_over(self) -> bool:
        """Whether enough iterations have been measured."""
        return len(self._measured[False]) == _ITERATIONS_EACH

    @property
    def medians(self) -> tuple[float, float]:
        """Median seconds of an iteration on this rank, with overlap and without."""
        return statistics.median(self._measured[True]), statistics.median(self._measured[False])
