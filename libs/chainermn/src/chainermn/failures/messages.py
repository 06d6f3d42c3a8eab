"""What ranks and the monitor say to each other, and the form that is checked before it is used.

On its way, a message is a line of JSON: its name, then its fields.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin

from chainermn.failures.wait import Wait

# No rank, process or count comes near it, and a float still tells its neighbours apart.
_MOST = 1 << 53


class Member(NamedTuple):
    """Who joins."""

    rank: int
    #: What the connection is for, as a rank may have several.
    purpose: str
    host: str
    pid: int


class Address(NamedTuple):
    """Where somebody listens."""

    host: str
    port: int


class Hello(NamedTuple):
    """A rank's first words, to whoever listens on an address."""

    nonce: str


class Challenge(NamedTuple):
    """The listener proves itself, and asks the rank to do the same."""

    nonce: str
    proof: str


class Join(NamedTuple):
    """The rank proves itself, and who it is."""

    member: Member
    proof: str


class Welcome(NamedTuple):
    """The rank has joined."""


class Report(NamedTuple):
    """What a rank does; the starts of its calls are their ages in seconds."""

    #: Calls of the main thread and of others.
    main: Wait | None
    others: list[Wait]
    #: Streams whose number of calls has changed.
    counts: dict[str, int]
    #: Where the main thread is.
    place: str
    #: Whether the script has ended.
    left: bool


class Failing(NamedTuple):
    """A rank is about to print why it has failed, and to end the job."""

    #: The same on ranks that fail in the same way.
    reason: str


class Absent(NamedTuple):
    """These ranks, abbreviated by `as_ranges`, have not been able to join and never will."""

    ranks: str


class Expect(NamedTuple):
    """These ranks are about to join a job that others have joined before."""

    ranks: str


class Listening(NamedTuple):
    """Where the monitor listens for those that a rank has told it to expect."""

    addresses: list[Address]


class Stop(NamedTuple):
    """The job is being ended by somebody who knows why."""


class Tick(NamedTuple):
    """The monitor is there."""


class Go(NamedTuple):
    """All ranks have left, so each may end."""


class End(NamedTuple):
    """The job has to end, by this rank, for the reason that it has given, if any."""

    first: int | None
    reason: str


_OfRank: TypeAlias = Hello | Join | Report | Failing | Expect | Absent | Stop
_OfListener: TypeAlias = Challenge | Welcome | Listening | Tick | Go | End
Message: TypeAlias = _OfRank | _OfListener
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return what travels for a message."""
    return json.dumps([type(message).__name__, *message]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in a line, without the line's end; raise ValueError if it is none."""
    try:
        kind, *fields = _as(list[Any], json.loads(line))
        message: Message = _as(_KINDS.get(_as(str, kind)), fields)
    except (ValueError, RecursionError) as error:  # the latter of lists within lists
        raise ValueError(f"{line[:60]!r} is no message") from error
    return message


def _as(form: Any, value: Any) -> Any:
    """Return a value from JSON as a type; raise ValueError if it is of another one."""
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
    raise ValueError(f"{value!r:.60} is no {form}")


@functools.cache
def _forms_of(kind: Any) -> list[Any]:
    return list(typing.get_type_hints(kind).values())


def _printable(text: str) -> str:
    """Replace what could control the terminal that shows a text."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
