"""Tell the launcher, if there is one that listens, how its job ends.

Messages are for people. A launcher that looked for their words would end a job that prints them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from chainermn.connections.channel import Channel
from chainermn.connections.joining import Endpoint
from chainermn.connections.messages import Member
from chainermn.failures.messages import End
from chainermn.process.processes import numbers_in

#: Variable with the text of the launcher's `Endpoint`.
LAUNCHER = "CHAINERMN_LAUNCHER"
#: The monitor connects for as long as it runs; who else ends the job connects to say so.
MONITOR, GUARD, RANK = PURPOSES = "monitor", "guard", "rank"
# The job must end, even if the launcher cannot be reached.
_MOST_SECONDS = 1.0


def connect(purpose: str) -> Channel | None:
    """Connect to the launcher; return None if none listens or if it cannot be reached."""
    numbers = numbers_in(os.environ)
    with contextlib.suppress(ValueError):  # the variable may hold something else
        if numbers is not None and LAUNCHER in os.environ:
            endpoint = Endpoint.from_text(os.environ[LAUNCHER])
            return endpoint.join(Member(numbers.rank, purpose, socket.gethostname(), os.getpid()))
    return None


def tell_end(purpose: str, lost: str) -> None:
    """Tell the launcher that this process ends the job, and which host is lost, if any."""

    def tell() -> None:
        if channel := connect(purpose):
            channel.send(End(None, "", lost))
            channel.close()

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join(_MOST_SECONDS)
