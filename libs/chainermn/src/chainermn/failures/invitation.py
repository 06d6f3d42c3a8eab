"""How the ranks reach the monitor, which rank 0 starts."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from chainermn.failures.channel import Channel
from chainermn.failures.helper import start_helper
from chainermn.failures.joining import (
    LOOPBACK,
    Entrance,
    listen,
    own_addresses,
)
from chainermn.failures.messages import Member
from chainermn.failures.wait import as_ranges

PURPOSE = "watch"


class Invitation(NamedTuple):
    """How a rank reaches the monitor."""

    host: str
    entrance: Entrance
    #: Ranks that are expected, abbreviated by `as_ranges`, and number of ranks of the job.
    ranks: str
    size: int
    #: Seconds of silence or waiting that count as a failure; 0 for no limit.
    limit: float
    #: Seconds between two reports.
    period: float

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Invitation:
        """Return one that was JSON in between."""
        host, entrance, *others = fields
        return cls(host, Entrance(*entrance), *others)

    @property
    def seconds_between_ticks(self) -> float:
        """After how many seconds a rank hears again that the monitor is there."""
        return max(self.period, self.limit / 10)

    def accept(self, rank: int) -> Channel | None:
        """Connect a rank to the monitor; return None if that cannot be reached."""
        member = Member(rank, PURPOSE, socket.gethostname(), os.getpid())
        return self.entrance.enter(member)


def start_monitor(
    ranks: Sequence[int], size: int, limit: float, *, is_one_host: bool
) -> tuple[Invitation, subprocess.Popen[bytes]]:
    """Start a monitor for ranks; return also its process, which ends with the last of them.

    There are ``size`` ranks in the job. If all are on this host, no other one can connect. Raises
    OSError if no socket or process can be had.
    """
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(each)
            for each in listen([LOOPBACK] if is_one_host else own_addresses())
        ]
        invitation = Invitation(
            socket.gethostname(),
            Entrance.to(sockets),
            as_ranges(ranks),
            size,
            limit,
            # One process handles this many reports per second with ease.
            max(min(1.0, limit / 10) if limit else 1.0, size / 500),
        )
        files = [each.fileno() for each in sockets]
        arguments = {"sockets": files, "invitation": invitation, "pid": os.getpid()}
        return invitation, start_helper("monitor", arguments, files)
