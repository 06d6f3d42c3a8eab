"""The settings of the watch, which rank 0 gives to the monitor and to all ranks."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from chainermn.connections.channel import Channel
from chainermn.connections.joining import LOOPBACK, Endpoint, listen, own_addresses
from chainermn.connections.messages import Member
from chainermn.failures.wait import as_ranges
from chainermn.process.helper import start_helper
from chainermn.process.processes import shows_errors

PURPOSE = "watch"


class WatchSettings(NamedTuple):
    """Where the monitor is, and what all ranks and the monitor must know of the watch."""

    #: Host of the monitor, and where it listens.
    host: str
    endpoint: Endpoint
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
    def from_json(cls, fields: Sequence[Any]) -> WatchSettings:
        """Rebuild the settings from the fields of their JSON form."""
        host, endpoint, *others = fields
        return cls(host, Endpoint(*endpoint), *others)

    @property
    def seconds_between_ticks(self) -> float:
        """Seconds between two signs of life from the monitor."""
        return max(self.period, self.limit / 10)

    def connect(self, rank: int) -> Channel | None:
        """Connect a rank to the monitor; return None if the monitor cannot be reached."""
        member = Member(rank, PURPOSE, socket.gethostname(), os.getpid())
        return self.endpoint.join(member)


def start_monitor(
    ranks: Sequence[int], size: int, limit: float, *, is_one_host: bool
) -> tuple[WatchSettings, subprocess.Popen[bytes]]:
    """Start a monitor; return the settings and the process, which ends with the last rank.

    The job has ``size`` ranks. If they are all on this host, other hosts cannot connect. Raises
    OSError if the system has no socket or process left.
    """
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(each)
            for each in listen([LOOPBACK] if is_one_host else own_addresses())
        ]
        settings = WatchSettings(
            socket.gethostname(),
            Endpoint.of(sockets),
            as_ranges(ranks),
            size,
            limit,
            # One process easily handles 500 reports per second.
            max(min(1.0, limit / 10) if limit else 1.0, size / 500),
            shows_errors(),
        )
        files = [each.fileno() for each in sockets]
        arguments = {"sockets": files, "settings": settings, "pid": os.getpid()}
        monitor = start_helper("chainermn.failures.monitor", arguments, files, leaves_group=False)
        return settings, monitor
