"""Start the monitor on rank 0, and tell all ranks how to reach it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from chainermn.failures.channel import Channel
from chainermn.failures.joining import (
    LOOPBACK,
    Entrance,
    listen,
    own_addresses,
)
from chainermn.failures.messages import Member
from chainermn.failures.wait import as_ranges
from chainermn.process.helper import start_helper
from chainermn.process.processes import shows_errors

PURPOSE = "watch"


class Invitation(NamedTuple):
    """Tells a rank how to reach the monitor."""

    host: str
    entrance: Entrance
    #: Expected ranks, abbreviated by `as_ranges`, and the number of ranks in the job.
    ranks: str
    size: int
    #: Seconds of silence or waiting that count as a failure; 0 means no limit.
    limit: float
    #: Seconds between two reports.
    period: float
    #: Whether messages of the job appear on a terminal. Only the host of mpiexec can see this.
    has_terminal: bool = False

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Invitation:
        """Rebuild an invitation from the fields of its JSON form."""
        host, entrance, *others = fields
        return cls(host, Entrance(*entrance), *others)

    @property
    def seconds_between_ticks(self) -> float:
        """Seconds between two signs of life from the monitor."""
        return max(self.period, self.limit / 10)

    def accept(self, rank: int) -> Channel | None:
        """Connect a rank to the monitor; return None if the monitor cannot be reached."""
        member = Member(rank, PURPOSE, socket.gethostname(), os.getpid())
        return self.entrance.enter(member)


def start_monitor(
    ranks: Sequence[int], size: int, limit: float, *, is_one_host: bool
) -> tuple[Invitation, subprocess.Popen[bytes]]:
    """Start a monitor; return an invitation and the process, which ends with the last rank.

    The job has ``size`` ranks. If they are all on this host, other hosts cannot connect. Raises
    OSError if the system has no socket or process left.
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
            # One process easily handles 500 reports per second.
            max(min(1.0, limit / 10) if limit else 1.0, size / 500),
            shows_errors(),
        )
        files = [each.fileno() for each in sockets]
        arguments = {"sockets": files, "invitation": invitation, "pid": os.getpid()}
        return invitation, start_helper("chainermn.failures.monitor", arguments, files)
