"""Learn from the watch of a job, on any of its hosts, how the job ends."""

from __future__ import annotations

import selectors
import threading
import time

from chainermn.connections.channel import Channel
from chainermn.connections.joining import Endpoint, Listener, listen, own_addresses
from chainermn.failures.launcher import LAUNCHER, PURPOSES
from chainermn.failures.messages import OF_MONITOR, End, Go

#: Seconds that the watch gets to say how the job has ended, once mpiexec has ended.
PATIENCE = 5.0
# Seconds between two looks at whether mpiexec has ended.
_PERIOD = 0.1


class Ending:
    """Hears how one attempt ends; a context manager, which leaves when that is known.

    Whoever connects must say whether the job has to end, or that all ranks have left. If it does
    not, its host is lost.

    Parameters
    ----------
    size : int
        Number of ranks.

    Attributes
    ----------
    environment : dict of str to str
        Variables that tell the watch where to connect.
    began_at : float or None
        Time since when the job has had to end, unless it ends by itself.
    lost : str
        First lost host, under the name that it gives itself; empty if none is to blame.

    Raises
    ------
    OSError
        If the system has no socket left.
    """

    def __init__(self, size: int) -> None:
        sockets = listen(own_addresses())
        endpoint = Endpoint.of(sockets)
        self.environment = {LAUNCHER: endpoint.as_text()}
        self.began_at: float | None = None
        self.lost = ""
        self._listener = Listener(sockets, endpoint.key, range(size), PURPOSES)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        # The hosts of those who have not said how the job ends.
        self._hosts: dict[Channel, str] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Ending:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        self._thread.join()
        for channel in [*self._hosts]:
            self._take(channel, End(None, "", self._hosts[channel]))
        self._selector.close()
        self._listener.close()

    def _listen(self) -> None:
        deadline = float("inf")
        while self._hosts or not self._has_ended.is_set():
            for key, _ in self._selector.select(_PERIOD):
                if isinstance(key.fileobj, Channel):
                    self._hear(key.fileobj)
            for channel, member in self._listener.serve(now := time.monotonic()):
                self._hosts[channel] = member.host
                self._selector.register(channel, selectors.EVENT_READ)
            if self._has_ended.is_set():
                deadline = min(deadline, now + PATIENCE)
            if now > deadline:
                return

    def _hear(self, channel: Channel) -> None:
        try:
            said = channel.receive(OF_MONITOR)
        except ConnectionError:
            said = [End(None, "", self._hosts[channel])]
        for message in said:
            if isinstance(message, (End, Go)) and channel in self._hosts:
                self._take(channel, message)

    def _take(self, channel: Channel, message: End | Go) -> None:
        if isinstance(message, End) and self.began_at is None:
            # Ranks and hosts that are lost from now on were ended on purpose.
            self.began_at, self.lost = time.monotonic(), message.lost
        del self._hosts[channel]
        self._selector.unregister(channel)
        channel.close()
