"""Find out which rank another rank waited for in a call, and until when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Call(NamedTuple):
    """A call that meets the calls with the same stream and number on other ranks."""

    stream: str
    number: int
    #: Nanoseconds on a clock that all ranks share.
    start: int
    end: int


class Wait(NamedTuple):
    """The rank that another rank waited for in a call."""

    rank: int
    #: Time at which that rank arrived.
    until: int


def waits(calls: Sequence[Sequence[Call]]) -> list[list[Wait | None]]:
    """Return, for each call of each rank, the rank it waited for; None if it did not wait.

    This is the last rank that arrived after it and before its call ended. It did not wait for
    ranks that arrived later.
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
