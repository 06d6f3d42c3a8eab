"""How a rank spends the time of an iteration: a sum for each kind of work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chainermn.spans import Span
from chainermn.timeline.waiting import Call

#: The time of an iteration is the sum over these. Layers are what multi-node layers exchange in
#: forward and backward.
KINDS = (
    *("data", "compute", "layers", "exchange"),
    *("evaluation", "checkpoint", "extensions", "other"),
)

#: How the names of spans of extensions begin.
EXTENSION = "extension "

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
_WHOLE = ("evaluation", "checkpoint", "layers", "exchange")


class Iteration(NamedTuple):
    """What a rank did in one iteration."""

    #: By kind.
    nanoseconds: dict[str, int]
    #: Calls that meet those of other ranks, and the kind that their time is counted as.
    calls: list[tuple[str, Call]]
    #: Nanoseconds by the name of an extension, without evaluation and checkpoints.
    extensions: dict[str, int]


class _Open(NamedTuple):
    """A span that has not ended yet."""

    end: int
    kind: str
    extension: str


def divide(start: int, end: int, within: Iterable[Span]) -> Iteration:
    """Return where the time of an iteration goes, given the spans of the main track in it."""
    iteration = Iteration(dict.fromkeys(KINDS, 0), [], {})
    open_spans = [_Open(end, "other", "")]
    reached = start
    for span in sorted(within, key=lambda span: (span.start, -span.end)):
        reached = _go_on(open_spans, reached, span.start, iteration)
        _, outer, extension = open_spans[-1]
        kind = outer if outer in _WHOLE else kind_of(span, outer)
        if "stream" in span.details:
            kind = "layers" if outer == "compute" else kind
            which = span.details["stream"], span.details["number"]
            iteration.calls.append((kind, Call(*which, span.start, span.end)))
        if span.name.startswith(EXTENSION):
            extension = span.name.removeprefix(EXTENSION)
        open_spans.append(_Open(span.end, kind, extension))
    _go_on(open_spans, reached, end, iteration)
    return iteration


def _go_on(open_spans: list[_Open], reached: int, until: int, iteration: Iteration) -> int:
    """Give the time from one moment to another to the innermost spans of its parts."""
    while True:
        end, kind, extension = open_spans[-1]
        part = min(end, until) - reached
        if part > 0:
            iteration.nanoseconds[kind] += part
            if kind == "extensions" and extension:
                before = iteration.extensions.get(extension, 0)
                iteration.extensions[extension] = before + part
            reached += part
        if end > until or len(open_spans) == 1:
            return reached
        open_spans.pop()


def kind_of(span: Span, outer: str = "other") -> str:
    """Return the kind of work of a span; that of the one around it if it has none of its own."""
    if span.name.startswith(EXTENSION):
        return "extensions"
    return _KIND_OF.get(span.name, "exchange" if "stream" in span.details else outer)


def iterations_of(track: Sequence[Span]) -> list[Iteration]:
    """Return the iterations of the spans of a whole main track."""
    found = []
    pending: list[Span] = []
    for span in sorted(track, key=lambda span: (span.end, -span.start)):
        if span.name == "iteration":
            within = [one for one in pending if one.start >= span.start]
            found.append(divide(span.start, span.end, within))
            pending.clear()
        elif kind_of(span, ""):
            pending.append(span)
    return found
