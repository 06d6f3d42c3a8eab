"""What this rank does and when: named spans of time, for timelines and reports.

Nothing is measured until somebody listens. Until then a `span` costs a tenth of a microsecond.
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

#: The track of what the training script itself does.
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
    #: What else is known, for people; for a call that needs other ranks, ``stream`` and
    #: ``number`` tell which calls it meets there.
    details: Mapping[str, Any] = _NO_DETAILS


class Streams(Protocol):
    """What tells when a GPU does what the host has given it."""

    def mark(self) -> Any:
        """Return a mark of the place in the current stream that the host has come to."""

    def add(self, name: str, start: Any, end: Any, details: Mapping[str, Any]) -> None:
        """Tell of a span when the GPU has come to the mark of its end."""


#: Is given each span when it ends, in the thread that it belongs to.
Listener: TypeAlias = Callable[[Span], None]

_listeners: tuple[Listener, ...] = ()

_streams: Streams | None = None

#: Time in nanoseconds, on a clock that all processes of a host share.
now = time.monotonic_ns


def listen(listener: Listener) -> None:
    """Have a function get every span that ends from now on."""
    global _listeners
    _listeners = (*_listeners, listener)


def unlisten(listener: Listener) -> None:
    """Let a function get no more spans."""
    global _listeners
    _listeners = tuple(other for other in _listeners if other != listener)


def measure_streams(streams: Streams | None) -> None:
    """Have what is in each `span` measured on the streams of a GPU, too; None: no more."""
    global _streams
    _streams = streams


def are_streams_measured() -> bool:
    """Tell whether what is in spans is measured on the streams of a GPU."""
    return _streams is not None


def are_wanted() -> bool:
    """Tell whether anybody listens."""
    return bool(_listeners)


def add(
    name: str,
    start: int,
    end: int,
    track: str | None = None,
    details: Mapping[str, Any] = _NO_DETAILS,
) -> None:
    """Tell of a span that has ended; by default on the track of this thread."""
    ended = Span(name, track or threading.current_thread().name, start, end, details)
    for listener in _listeners:
        listener(ended)


def span(
    name: str, track: str | None = None, details: Mapping[str, Any] = _NO_DETAILS
) -> AbstractContextManager[object]:
    """Return a context manager that measures the ``with`` block, if anybody listens.

    Parameters
    ----------
    name : str
        What is done in it, such as ``'forward'``.
    track : str, optional
        Where, if not in this thread.
    details : mapping, optional
        What else people would like to know of it.
    """
    return _Measured(name, track, details) if _listeners else _UNMEASURED


_UNMEASURED = contextlib.nullcontext()


def spanned(name: str) -> Callable[[F], F]:
    """Return a decorator that measures each call of a function, if anybody listens."""

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
