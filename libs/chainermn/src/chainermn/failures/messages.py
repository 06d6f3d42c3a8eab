"""Messages between ranks and the monitor."""

from __future__ import annotations

from typing import NamedTuple

from chainermn.connections.messages import Address
from chainermn.failures.wait import Wait


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
    #: Host that is to blame, as it went silent or lost a rank; empty if none is.
    lost: str = ""


#: What a rank sends, and what the monitor sends.
OF_RANK = (Report, Failing, Absent, Expect, Stop)
OF_MONITOR = (Listening, Tick, Go, End)
