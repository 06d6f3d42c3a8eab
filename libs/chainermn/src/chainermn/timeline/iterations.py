"""How a rank spends the time of its iterations: a sum for each kind of work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chainermn.spans import Span
from chainermn.timeline.waiting import Call

#: The time of an iteration is the sum over these.
KINDS = ("data", "compute", "exchange", "evaluation", "checkpoint", "extensions", "other")

_KIND_OF = {
    "data": "data",
    "convert": "data",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "wait for the exchange": "exchange",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "extensions": "extensions",
}
# What happens inside of these belongs to them, whatever it is.
_WHOLE = ("evaluation", "checkpoint", "exchange")


@dataclass
class Iterations:
    """The iterations of one rank.

    Attributes
    ----------
    seconds : list of dict
        For each iteration, seconds by kind.
    calls : list of (int, Call)
        The calls in which time of the kind ``'exchange'`` was spent, each with the index of its
        iteration.
    """

    seconds: list[dict[str, float]] = field(default_factory=list)
    calls: list[tuple[int, Call]] = field(default_factory=list)

    def add(self, start: int, end: int, within: Iterable[Span]) -> None:
        """Add an iteration, given its times and the spans of the main track in it."""
        seconds = dict.fromkeys(KINDS, 0)
        open_spans: list[tuple[int, str]] = [(end, "other")]
        reached = start
        for span in sorted(within, key=lambda span: (span.start, -span.end)):
            reached = self._go_on(open_spans, reached, span.start, seconds)
            outer = open_spans[-1][1]
            kind = outer if outer in _WHOLE else kind_of(span, outer)
            if kind == "exchange" and outer != kind and "stream" in span.details:
                which = span.details["stream"], span.details["number"]
                self.calls.append((len(self.seconds), Call(*which, span.start, span.end)))
            open_spans.append((span.end, kind))
        self._go_on(open_spans, reached, end, seconds)
        self.seconds.append({kind: taken / 1e9 for kind, taken in seconds.items()})

    @staticmethod
    def _go_on(
        open_spans: list[tuple[int, str]], reached: int, until: int, seconds: dict[str, int]
    ) -> int:
        """Give the time from one moment to another to the innermost spans of its parts."""
        while open_spans[-1][0] <= until and len(open_spans) > 1:
            end, kind = open_spans.pop()
            seconds[kind] += max(end - reached, 0)
            reached = max(end, reached)
        seconds[open_spans[-1][1]] += max(until - reached, 0)
        return max(until, reached)


def kind_of(span: Span, outer: str = "other") -> str:
    """Return the kind of work of a span; that of the one around it if it has none of its own."""
    return _KIND_OF.get(span.name, "exchange" if "stream" in span.details else outer)


def iterations_of(track: Sequence[Span]) -> Iterations:
    """Return the iterations of the spans of a whole main track."""
    found = Iterations()
    pending: list[Span] = []
    for span in sorted(track, key=lambda span: (span.end, -span.start)):
        if span.name == "iteration":
            found.add(span.start, span.end, [one for one in pending if one.start >= span.start])
            pending.clear()
        elif kind_of(span, ""):
            pending.append(span)
    return found
