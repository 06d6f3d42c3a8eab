"""What counts as a message when anybody may send anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chainermn.connections.messages import Join, Member, Message, decode, encode
from chainermn.failures.messages import OF_MONITOR, OF_RANK, End, Failing, Report
from chainermn.failures.wait import Wait

KINDS = (*OF_RANK, *OF_MONITOR, Join)
WAIT = Wait("communicator 1 of ranks 0-1", 3, "allreduce", "0-1", 0.5)
REPORT = Report(WAIT, [WAIT], {"a stream": 3}, "train.py:7", False)


@pytest.mark.parametrize(
    "message",
    [
        REPORT,
        REPORT._replace(main=None, others=[], counts={}),
        Join(Member(3, "watch", "here", 103), "proof"),
        End(None, ""),
        End(2, "why", "b"),
    ],
)
def test_message_arrives_as_it_was(message: Message) -> None:
    assert decode(encode(message).removesuffix(b"\n"), KINDS) == message


def text_of(**changes: Any) -> bytes:
    """Return an encoded report with some fields changed."""
    fields = {**REPORT._asdict(), **changes}
    return json.dumps(["Report", *fields.values()]).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r",
        b"\xff\xfe\x00",
        b"null",
        b"1",
        b'"Tick"',
        b"[]",
        b"[[]]",
        b"[null]",
        b'["Unknown"]',
        b'["Wait"]',
        b'["Hello", "a nonce"]',
        b'["Tick", 1]',
        b'["End", 1]',
        b'{"Tick": 1}',
        b'["End", true, "", ""]',
        b'["End", -1, "", ""]',
        b'["End", 1.0, "", ""]',
        b'["End", 1e400, "", ""]',
        b'["End", ' + b"9" * 4000 + b', "", ""]',
        b'["End", ' + b"9" * 5000 + b', "", ""]',
        b'["End", NaN, "", ""]',
        b"[" * 100_000,
        b'["End", ' + b"[" * 100_000 + b"]" * 100_000 + b', "", ""]',
        text_of(main=list(WAIT)[:-1]),
        text_of(main=[*WAIT, 1]),
        text_of(main=WAIT._asdict()),
        text_of(main="allreduce"),
        text_of(main=WAIT._replace(since=float("nan"))),
        text_of(main=WAIT._replace(since=float("-inf"))),
        text_of(main=WAIT._replace(since=1e300)),
        text_of(main=WAIT._replace(number=True)),
        text_of(others=None),
        text_of(others={}),
        text_of(others=[None]),
        text_of(counts=[]),
        text_of(counts={"a stream": "3"}),
        text_of(counts={"a stream": -3}),
        text_of(place=7),
        text_of(left=1),
    ],
    ids=lambda line: repr(line[:50]),
)
def test_what_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError, match="is not a message"):
        decode(line, KINDS)


def test_text_cannot_control_a_terminal() -> None:
    hostile = "train.py\x1b[2J\n\x9b\u202e\ud800"
    assert decode(encode(Failing(hostile))[:-1], KINDS) == Failing("train.py?[2J????")
    assert decode(encode(Failing("ä→ 中"))[:-1], KINDS) == Failing("ä→ 中")
