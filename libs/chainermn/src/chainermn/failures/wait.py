"""A call that needs other ranks, as ranks report it to each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

#: What a stream of messages has in its name, between the communicator and the two ranks.
MESSAGES = ", messages from rank "


class Wait(NamedTuple):
    """A call that is under way.

    Attributes
    ----------
    stream : str
        Among whose calls it is numbered.
    number : int
        From 1.
    operation : str
        As the user called it.
    members : str
        The ranks that it needs, as from `as_ranges`.
    since : float
        By ``time.monotonic``.
    caller : str
        The part of the program that makes it, as ``extension 'validation' (Evaluator)``; empty
        if that is not known.
    """

    stream: str
    number: int
    operation: str
    members: str
    since: float
    caller: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members."""
        return from_ranges(self.members)

    @property
    def key(self) -> tuple[str, int, str]:
        """What ranks that are in the same call have in common, messages apart."""
        return self.stream, self.number, self.operation

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks; they call it differently."""
        return MESSAGES in self.stream

    @property
    def name(self) -> str:
        """What the user calls it."""
        return f"{self.operation} (call {self.number} on {self.stream})"


def as_ranges(ranks: Sequence[int]) -> str:
    """Return ranks in short, as in ``0-2,5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


@functools.lru_cache(1024)
def from_ranges(ranges: str) -> tuple[int, ...]:
    """Return the ranks of which `as_ranges` makes ``ranges``."""
    bounds = [[int(rank) for rank in part.split("-")] for part in ranges.split(",")]
    return tuple(rank for bound in bounds for rank in range(bound[0], bound[-1] + 1))
