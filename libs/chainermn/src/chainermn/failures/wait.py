"""A call that needs other ranks, as ranks report it to the monitor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

#: Separates the communicator from the two ranks in the name of a stream of messages.
MESSAGES = ", messages from rank "

# More than any job has.
_MOST_RANKS = 1 << 20

#: Tells apart calls; see `Wait.key`.
Key: TypeAlias = tuple[str, int, str]


class Wait(NamedTuple):
    """A call in progress."""

    #: Calls are numbered within a stream: a communicator, or messages between two of its ranks.
    stream: str
    #: Counted from 1.
    number: int
    #: Name of the method that the user called.
    operation: str
    #: Ranks that must make the call, as returned by `as_ranges`.
    members: str
    #: Start of the call, by ``time.monotonic``.
    since: float
    #: Part of the program that makes it, as ``extension 'validation' (Evaluator)``, if known.
    caller: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that must make the call."""
        return from_ranges(self.members)

    @property
    def key(self) -> Key:
        """The same on all ranks that are in the same collective."""
        return self.stream, self.number, self.operation

    @property
    def is_message(self) -> bool:
        """Whether it is a message, for which the two ranks call different methods."""
        return MESSAGES in self.stream

    @property
    def name(self) -> str:
        """Name of the call in messages."""
        return f"{self.operation} (call {self.number} on {self.stream})"


def as_ranges(ranks: Sequence[int]) -> str:
    """Abbreviate a list of ranks, as in ``0-2,5``, without the negative ones of other worlds."""
    parts: list[list[int]] = []
    for rank in (each for each in ranks if each >= 0):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


@functools.lru_cache(1024)
def from_ranges(ranges: str) -> tuple[int, ...]:
    """Return the ranks that `as_ranges` has abbreviated; raise ValueError if it has not."""
    bounds = [[int(rank) for rank in part.split("-")] for part in ranges.split(",")]
    lengths = [bound[-1] - bound[0] + 1 for bound in bounds]
    if min(lengths) < 1 or sum(lengths) > _MOST_RANKS:
        raise ValueError(f"expected at most {_MOST_RANKS} ranks as in 0-2,5")
    return tuple(rank for bound in bounds for rank in range(bound[0], bound[-1] + 1))


@functools.lru_cache(1024)
def last_of(ranges: str) -> int:
    """Return the highest rank of those that `as_ranges` has abbreviated."""
    return max(from_ranges(ranges))
