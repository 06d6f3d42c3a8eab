"""Strangers that send the words of ranks, and anything that looks like them."""

from __future__ import annotations

import contextlib
import random
import socket

from chainermn.connections.messages import Hello, Join, Member, Message, encode
from chainermn.failures.messages import Absent, End, Failing, Report, Stop
from chainermn.failures.wait import Wait

_MESSAGES: list[Message] = [
    Hello("a nonce"),
    Join(Member(1, "watch", "here", 101), "00" * 32),
    Report(Wait("a stream", 3, "allreduce", "0-1", 0.5), [], {"a stream": 3}, "", True),
    Failing("a reason"),
    Absent("0-1"),
    Stop(),
    End(0, ""),
]
_WORDS = [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", *map(encode, _MESSAGES)]
_PIECES = [b"\n", b"[", b"]", b'"', b"9" * 400, b"\xff", b"\0", b"NaN", b"\\ud800", b"[" * 4000]
# Number of strangers that stay connected, so that there are always some.
_CROWD = 30


def mutated(words: bytes, numbers: random.Random) -> bytes:
    """Return words in which some bytes are changed, removed, repeated or inserted."""
    changed = bytearray(words)
    for _ in range(numbers.randrange(5)):
        at = numbers.randrange(len(changed)) if changed else 0
        kind = numbers.randrange(4)
        if kind == 0:
            changed[at : at + 1] = numbers.randbytes(1)
        elif kind == 1:
            del changed[at : at + numbers.randrange(8)]
        elif kind == 2:
            changed[at:at] = changed[at : at + 40] * numbers.randrange(30)
        else:
            changed[at:at] = numbers.choice(_PIECES)
    return bytes(changed)


def visit(address: tuple[str, int], times: int, seed: int = 0) -> int:
    """Connect this many times and send random words; return how often nobody listened."""
    numbers = random.Random(seed)
    crowd: list[socket.socket] = []
    n_refused = 0
    for _ in range(times):
        crowd.append(socket.socket())
        if crowd[-1].connect_ex(address) != 0:
            n_refused += 1
            crowd.pop().close()
            continue
        with contextlib.suppress(OSError):  # this stranger has been dropped
            for _ in range(numbers.randrange(5)):
                crowd[-1].sendall(mutated(numbers.choice(_WORDS), numbers))
            if numbers.randrange(10) == 0:
                crowd[-1].shutdown(socket.SHUT_WR)
        if len(crowd) > _CROWD:
            crowd.pop(numbers.randrange(len(crowd))).close()
    for stranger in crowd:
        stranger.close()
    return n_refused
