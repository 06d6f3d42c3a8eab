"""Messages between ranks and the monitor, and checks of their form.

A message travels as a line of JSON: its name, then its fields.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin

from chainermn.failures.wait import Wait

# Larger than any rank, process or count, and still exact as a float.
_MOST = 1 << 53


class Member(NamedTuple):
    """A rank that joins."""

    rank: int
    #: Purpose of the connection, since a rank may have several.
    purpose: str
    host: str
    pid: int


class Address(NamedTuple):
    """An address and port at which something listens."""

    host: str
    port: int


class Hello(NamedTuple):
    """A rank says hello to an unknown listener."""

    nonce: str


class Challenge(NamedTuple):
    """The listener proves itself and asks the rank to do the same."""

    nonce: str
    proof: str


class Join(NamedTuple):
    """The rank proves itself and its identity."""

    member: Member
    proof: str


class Welcome(NamedTuple):
    """The rank has joined."""


class Report(NamedTuple):
    """A rank reports what it is doing. Its calls have ages in seconds instead of starts."""

    #: Current calls of the main thread and of other threads.
    main: Wait | None
    others: list[Wait]
    #: Numbers of calls on the streams where they have changed.
    counts: dict[str, int]
    #: Current place of the main thread.
    place: str
    #: Whether the script has ended.
    left: bool


class Failing(NamedTuple):
    """A rank is about to print why it has failed and to end the job."""

    #: Equal on ranks that fail in the same way.
    reason: str


class Absent(NamedTuple):
    """These ranks, abbreviated by `as_ranges`, could not join and never will."""

    ranks: str


class Expect(NamedTuple):
    """These ranks are about to join a job that others have already joined."""

    ranks: str


class Listening(NamedTuple):
    """The monitor listens on these addresses for the ranks that it was told to expect."""

    addresses: list[Address]


class Stop(NamedTuple):
    """The job will be ended by something else, for a known reason."""


class Tick(NamedTuple):
    """The monitor is alive."""


class Go(NamedTuple):
    """All ranks have left, so each may end."""


class End(NamedTuple):
    """The job must end. The rank ``first`` ends it, for the reason that it gave, if any."""

    first: int | None
    reason: str


_OfRank: TypeAlias = Hello | Join | Report | Failing | Expect | Absent | Stop
_OfListener: TypeAlias = Challenge | Welcome | Listening | Tick | Go | End
Message: TypeAlias = _OfRank | _OfListener
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps([type(message).__name__, *message]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Parse a line, without its newline; raise ValueError if it is not a message."""
    try:
        kind, *fields = _as(list[Any], json.loads(line))
        message: Message = _as(_KINDS.get(_as(str, kind)), fields)
    except (ValueError, RecursionError) as error:  # deeply nested lists exceed the recursion limit
        raise ValueError(f"{line[:60]!r} is not a message") from error
    return message


def _as(form: Any, value: Any) -> Any:
    """Convert a value from JSON to a type; raise ValueError if it does not match."""
    if form is Any:
        return value
    if form is str and type(value) is str:
        return _printable(value)
    if form is bool and type(value) is bool:
        return value
    if form is int and type(value) is int and 0 <= value < _MOST:
        return value
    if form is float and type(value) in (int, float) and abs(value) < _MOST:
        return float(value)
    if hasattr(form, "_fields") and type(value) is list:
        return form(*(_as(part, each) for part, each in zip(_forms_of(form), value, strict=True)))
    origin, parts = get_origin(form), get_args(form)
    if origin is types.UnionType:
        return None if value is None else _as(parts[0], value)
    if origin is list and type(value) is list:
        return [_as(parts[0], each) for each in value]
    if origin is dict and type(value) is dict:
        return {_as(parts[0], key): _as(parts[1], each) for key, each in value.items()}
    raise ValueError(f"expected {form}, got {value!r:.60}")


@functools.cache
def _forms_of(kind: Any) -> list[Any]:
    return list(typing.get_type_hints(kind).values())


def _printable(text: str) -> str:
    """Replace characters that could control the terminal that shows a text."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
