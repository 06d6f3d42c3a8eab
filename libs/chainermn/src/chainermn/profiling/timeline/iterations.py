"""Divide the time of a rank's iterations by kind of work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chainermn.profiling.timeline.waiting import Call
from chainermn.spans import Span

#: Kinds of work, whose times add up to the time of an iteration. "layers" means the exchanges of
#: multi-node layers in forward and backward.
KINDS = (
    *("data", "compute", "layers", "exchange"),
    *("evaluation", "checkpoint", "extensions", "other"),
)

#: Beginning of the names of extensions' spans.
EXTENSION = "extension "

_KIND_OF = {
    "data": "data",
    "convert": "data",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "CUDA graph": "compute",
    "wait for the exchange": "exchange",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "extensions": "extensions",
}
# Everything inside these kinds counts as part of them.
_WHOLE = ("evaluation", "checkpoint", "layers", "exchange")


class Iteration(NamedTuple):
    """A rank's work in one iteration."""

    #: Nanoseconds by kind.
    nanoseconds: dict[str, int]
    #: Calls that meet those of other ranks, each with its kind.
    calls: list[tuple[str, Call]]
    #: Nanoseconds by name of the extension, without evaluation and checkpoints.
    extensions: dict[str, int]


class _Open(NamedTuple):
    """A span that has not ended yet."""

    end: int
    kind: str
    extension: str


def divide(start: int, end: int, within: Iterable[Span]) -> Iteration:
    """Divide an iteration, given the spans of the main track inside it."""
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
    """Assign each part of the time between two moments to its innermost span."""
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
    """Return the kind of work of a span, by default that of the span around it."""
    if span.name.startswith(EXTENSION):
        return "extensions"
    return _KIND_OF.get(span.name, "exchange" if "stream" in span.details else outer)


def iterations_of(track: Sequence[Span]) -> list[Iteration]:
    """Return the iterations in the spans of a whole main track."""
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
