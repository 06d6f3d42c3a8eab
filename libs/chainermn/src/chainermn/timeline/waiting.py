"""For whom a rank waited in a call, and until when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Call(NamedTuple):
    """A call that meets calls on other ranks: those of the same stream and number."""

    stream: str
    number: int
    #: By a clock that all ranks share, in nanoseconds.
    start: int
    end: int


class Wait(NamedTuple):
    """What a rank waited for in a call."""

    rank: int
    #: When that rank came.
    until: int


def waits(calls: Sequence[Sequence[Call]]) -> list[list[Wait | None]]:
    """Return for each call of each rank which rank it waited for; None if for none.

    That is the last of those which came after it, and before it went on: for a rank that comes
    later, it did not wait.
    """
    arrivals: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, of_rank in enumerate(calls):
        for call in of_rank:
            arrivals[call.stream, call.number].append((call.start, rank))
    return [
        [_wait(call, arrivals[call.stream, call.number]) for call in of_rank] for of_rank in calls
    ]


def _wait(call: Call, arrivals: Sequence[tuple[int, int]]) -> Wait | None:
    last, rank = max(arrival for arrival in arrivals if arrival[0] <= call.end)
    return Wait(rank, last) if last > call.start else None
