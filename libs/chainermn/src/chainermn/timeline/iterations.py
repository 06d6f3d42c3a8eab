"""How a rank spends the time of its iterations: a sum for each kind of work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


#: How the names of spans of extensions begin.
EXTENSION = "extension "


class _Open(NamedTuple):
    """A span that has not ended yet."""

    end: int
    kind: str
    extension: str


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
    extensions : dict
        Seconds by the name of an extension, without evaluation and checkpoints.
    """

    seconds: list[dict[str, float]] = field(default_factory=list)
    calls: list[tuple[int, Call]] = field(default_factory=list)
    extensions: dict[str, float] = field(default_factory=dict)

    def add(self, start: int, end: int, within: Iterable[Span]) -> None:
        """Add an iteration, given its times and the spans of the main track in it."""
        nanoseconds = dict.fromkeys(KINDS, 0)
        open_spans = [_Open(end, "other", "")]
        reached = start
        for span in sorted(within, key=lambda span: (span.start, -span.end)):
            reached = self._go_on(open_spans, reached, span.start, nanoseconds)
            _, outer, extension = open_spans[-1]
            kind = outer if outer in _WHOLE else kind_of(span, outer)
            if kind == "exchange" and outer != kind and "stream" in span.details:
                which = span.details["stream"], span.details["number"]
                self.calls.append((len(self.seconds), Call(*which, span.start, span.end)))
            if span.name.startswith(EXTENSION):
                extension = span.name.removeprefix(EXTENSION)
            open_spans.append(_Open(span.end, kind, extension))
        self._go_on(open_spans, reached, end, nanoseconds)
        self.seconds.append({kind: taken / 1e9 for kind, taken in nanoseconds.items()})

    def _go_on(
        self, open_spans: list[_Open], reached: int, until: int, nanoseconds: dict[str, int]
    ) -> int:
        """Give the time from one moment to another to the innermost spans of its parts."""
        while True:
            end, kind, extension = open_spans[-1]
            part = min(end, until)
            if part > reached:
                nanoseconds[kind] += part - reached
                if kind == "extensions" and extension:
                    seconds = self.extensions.get(extension, 0.0)
                    self.extensions[extension] = seconds + (part - reached) / 1e9
                reached = part
            if end > until or len(open_spans) == 1:
                return reached
            open_spans.pop()


def kind_of(span: Span, outer: str = "other") -> str:
    """Return the kind of work of a span; that of the one around it if it has none of its own."""
    if span.name.startswith(EXTENSION):
        return "extensions"
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
