"""A call that needs other ranks, as ranks report it to the monitor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

#: Separates the communicator from the two ranks in the name of a stream of messages.
MESSAGES = ", messages from rank "

# More than any job has.
_MOST_RANKS = 1 << 20

#: Identifies a call; see `Wait.key`.
Key: TypeAlias = tuple[str, int, str]


class Wait(NamedTuple):
    """A call in progress."""

    #: Communicator, or messages between two of its ranks, within which calls are numbered.
    stream: str
    #: Number of the call, counted from 1.
    number: int
    #: Name of the method that the user called.
    operation: str
    #: Ranks that must make the call, as returned by `as_ranges`.
    members: str
    #: Start of the call, by ``time.monotonic``.
    since: float
    #: Part of the program that made it, such as ``extension 'validation' (Evaluator)``, if known.
    caller: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that must make the call."""
        return from_ranges(self.members)

    @property
    def key(self) -> Key:
        """Key that is equal on all ranks that are in the same collective."""
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
    """Abbreviate a list of ranks, as in ``0-2,5``, leaving out negative ones of other worlds."""
    parts: list[list[int]] = []
    for rank in (each for each in ranks if each >= 0):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


@functools.lru_cache(1024)
def from_ranges(ranges: str) -> tuple[int, ...]:
    """Return the ranks in a list from `as_ranges`; raise ValueError if it is not such a list."""
    bounds = [[int(rank) for rank in part.split("-")] for part in ranges.split(",")]
    lengths = [bound[-1] - bound[0] + 1 for bound in bounds]
    if min(lengths) < 1 or sum(lengths) > _MOST_RANKS:
        raise ValueError(f"expected at most {_MOST_RANKS} ranks, written as in 0-2,5")
    return tuple(rank for bound in bounds for rank in range(bound[0], bound[-1] + 1))


@functools.lru_cache(1024)
def last_of(ranges: str) -> int:
    """Return the highest rank in a list from `as_ranges`."""
    return max(from_ranges(ranges))
