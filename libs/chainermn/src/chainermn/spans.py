"""Named spans of time on this rank, for timelines and reports.

Nothing is measured until a listener is added. Until then, a `span` costs a tenth of a microsecond.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

F = TypeVar("F", bound="Callable[..., Any]")

#: Track of the main thread, which runs the training script.
MAIN = threading.main_thread().name

_NO_DETAILS: Mapping[str, Any] = {}


class Span(NamedTuple):
    """A stretch of time in which a rank did one thing."""

    name: str
    #: Thread, or another place where one thing happens at a time.
    track: str
    #: Start and end, in nanoseconds of `now`.
    start: int
    end: int
    #: Details for people. For a call that needs other ranks, ``stream`` and ``number`` tell which
    #: calls of these ranks belong to it.
    details: Mapping[str, Any] = _NO_DETAILS


class Streams(Protocol):
    """An object that measures when a GPU does the work that the host has submitted."""

    def mark(self) -> Any:
        """Mark the current position in the current stream; None if it cannot be marked."""

    def add(self, name: str, start: Any, end: Any, details: Mapping[str, Any]) -> None:
        """Report a span as soon as the GPU has reached the mark of its end."""


#: A function that gets each span when it ends, in the thread that it belongs to.
Listener: TypeAlias = Callable[[Span], None]

_listeners: tuple[Listener, ...] = ()

_streams: Streams | None = None

#: Time in nanoseconds, from a clock that all processes of a host share.
now = time.monotonic_ns


def listen(listener: Listener) -> None:
    """Call a function with every span that ends from now on."""
    global _listeners
    _listeners = (*_listeners, listener)


def unlisten(listener: Listener) -> None:
    """Stop calling a function."""
    global _listeners
    _listeners = tuple(other for other in _listeners if other != listener)


def measure_streams(streams: Streams | None) -> None:
    """Also measure each `span` on the streams of a GPU; None stops this."""
    global _streams
    _streams = streams


def are_streams_measured() -> bool:
    """Tell whether spans are measured on the streams of a GPU."""
    return _streams is not None


def are_wanted() -> bool:
    """Tell whether there are listeners."""
    return bool(_listeners)


def add(
    name: str,
    start: int,
    end: int,
    track: str | None = None,
    details: Mapping[str, Any] = _NO_DETAILS,
) -> None:
    """Report a span that has ended, by default on the track of this thread."""
    ended = Span(name, track or threading.current_thread().name, start, end, details)
    for listener in _listeners:
        listener(ended)


def span(
    name: str, track: str | None = None, details: Mapping[str, Any] = _NO_DETAILS
) -> AbstractContextManager[object]:
    """Show a ``with`` block in the timeline, if one is recorded.

    Parameters
    ----------
    name : str
        Name of the work in the block, such as ``'forward'``.
    track : str, optional
        Track that shows it; the one of this thread by default.
    details : mapping, optional
        Further information to show.

    Examples
    --------
    >>> with chainermn.spans.span("augment images", details={"images": 32}):
    ...     x = np.zeros((32, 3, 8, 8))[:, :, :, ::-1]
    """
    return _Measured(name, track, details) if _listeners else _UNMEASURED


_UNMEASURED = contextlib.nullcontext()


def spanned(name: str) -> Callable[[F], F]:
    """Return a decorator that measures each call of a function, if there are listeners."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return function(*args, **kwargs)

        return cast(F, call)

    return decorate


class _Measured:
    def __init__(self, name: str, track: str | None, details: Mapping[str, Any]) -> None:
        self._name, self._track, self._details = name, track, details

    def __enter__(self) -> None:
        self._mark = None if _streams is None else _streams.mark()
        self._start = now()

    def __exit__(self, *error: object) -> None:
        if _streams is not None and self._mark is not None:
            _streams.add(self._name, self._mark, _streams.mark(), self._details)
        add(self._name, self._start, now(), self._track, self._details)
