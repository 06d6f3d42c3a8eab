"""The messages of joining, and how all messages are encoded and checked.

A message travels as a line of JSON: its name, then its fields.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin

#: Any named tuple of strings, numbers, lists, dicts and such tuples.
Message: TypeAlias = tuple[Any, ...]

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


def encode(message: Message) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps([type(message).__name__, *message]).encode() + b"\n"


def decode(line: bytes, kinds: Iterable[type[Message]]) -> Message:
    """Parse a line, without its newline; raise ValueError if it is not one of these messages."""
    try:
        name, *fields = _as(list[Any], json.loads(line))
        kind = next((each for each in kinds if each.__name__ == name), None)
        message: Message = _as(kind, fields)
    except (ValueError, RecursionError) as error:  # deeply nested lists exceed the recursion limit
        raise ValueError(f"{line[:60]!r} is not a message") from error
    return message


def _as(form: Any, value: Any) -> Any:
    """Convert a value from JSON to a type; raise ValueError if it does not match."""
    if form is Any:
        return value
    if form is str and type(value) is str:
        # Other characters could control the terminal that shows them.
        is_safe = value.isprintable()
        return value if is_safe else "".join(c if c.isprintable() else "?" for c in value)
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
