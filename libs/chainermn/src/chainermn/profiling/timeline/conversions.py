"""Functions that undo channels last, so that the next convolution converts its images again."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from chainermn import spans
from chainermn.spans import Span

#: Name of the span that marks a function.
NAME = "undo channels last"
#: Form of its details; see `chainermn.files.check_form`.
FORM = {"function": str, "link": str}


class Conversion(NamedTuple):
    """A function that undoes channels last, and the link that calls it, if there is one."""

    function: str
    link: str

    def __str__(self) -> str:
        return f"{self.function} in {self.link}" if self.link else self.function


def record(conversion: Conversion) -> None:
    """Mark where a function undoes channels last."""
    now = spans.now()
    spans.add(NAME, now, now, details=conversion._asdict())


def per_iteration(tracks: Iterable[Sequence[Span]]) -> Mapping[Conversion, float]:
    """Return how often each function undoes channels last in a mean iteration, most often first.

    ``tracks`` are the main tracks of all ranks.
    """
    counts: Counter[Conversion] = Counter()
    n_iterations = 0
    for track in tracks:
        iterations = sorted((s.start, s.end) for s in track if s.name == "iteration")
        n_iterations += len(iterations)
        for span in track:
            if span.name == NAME:
                before = bisect.bisect_right(iterations, (span.start, float("inf")))
                if before and span.start <= iterations[before - 1][1]:
                    counts[Conversion(span.details["function"], span.details["link"])] += 1
    return {conversion: n / n_iterations for conversion, n in counts.most_common()}
