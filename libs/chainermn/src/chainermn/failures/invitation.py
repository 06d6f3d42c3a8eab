"""How the ranks reach the monitor, which rank 0 starts."""

from __future__ import annotations

import os
import socket
import subprocess
from typing import NamedTuple

from chainermn.failures.channel import Channel, connect, listen, own_addresses
from chainermn.failures.helper import start_helper


class Invitation(NamedTuple):
    """How a rank reaches the monitor."""

    host: str
    addresses: list[str]
    port: int
    #: Secret of the job: messages from anybody who does not know it are ignored.
    token: str
    #: Seconds of silence or waiting that count as a failure; 0 for no limit.
    limit: float
    #: Seconds between two reports.
    period: float

    @property
    def seconds_between_ticks(self) -> float:
        """After how many seconds a rank hears again that the monitor is there."""
        return max(self.period, self.limit / 10)

    def accept(self, rank: int) -> Channel | None:
        """Connect a rank to the monitor; return None if that cannot be reached."""
        hello = {"token": self.token}
        channel = connect(self.addresses, self.port, hello)
        me = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        # Until all have been welcomed, the monitor would take those that leave for all ranks.
        if channel is None or channel.ask({**hello, **me}):
            return channel
        channel.close()
        return None


def start_monitor(size: int, limit: float) -> tuple[Invitation, subprocess.Popen[bytes]]:
    """Start a monitor for ``size`` ranks; return also its process, which ends with the last rank.

    Raises OSError if no socket or process can be had.
    """
    with listen() as listener:
        invitation = Invitation(
            socket.gethostname(),
            own_addresses(),
            listener.getsockname()[1],
            os.urandom(16).hex(),
            limit,
            # One process handles this many reports per second with ease.
            max(min(1.0, limit / 10) if limit else 1.0, size / 500),
        )
        arguments = {"listener": listener.fileno(), "invitation": invitation, "pid": os.getpid()}
        return invitation, start_helper("monitor", arguments, [listener.fileno()])
