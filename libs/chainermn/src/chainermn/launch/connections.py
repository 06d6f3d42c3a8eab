"""Connect ranks, on this host or on others, to the process that started them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import MutableMapping, Sequence
from multiprocessing.connection import Connection

from chainermn.connections import joining
from chainermn.connections.channel import Channel
from chainermn.connections.joining import LOOPBACK, Endpoint, listen, own_addresses
from chainermn.connections.messages import Member

#: Variable that names the job; all of the job's processes inherit it.
JOB = "_CHAINERMN_RUN"
# Not an argument, because all users of a host can see each other's command lines.
_ENDPOINT = "_CHAINERMN_RUN_ENDPOINT"

#: The purposes of each rank's connections, in the order in which it opens them.
PURPOSES = ("stdout", "stderr", "call")


class Listener:
    """Accepts connections of ranks: only from this host, unless ``hosts`` are given.

    It listens until each of ``size`` ranks has one for each of the `PURPOSES`.

    Attributes
    ----------
    environment : dict of str to str
        Variables that tell ranks where to connect.
    """

    def __init__(self, size: int, hosts: Sequence[object] | None) -> None:
        sockets = listen([LOOPBACK] if hosts is None else own_addresses())
        endpoint = Endpoint.of(sockets)
        self._listener = joining.Listener(sockets, endpoint.key, range(size), PURPOSES)
        self.environment = {JOB: secrets.token_hex(8), _ENDPOINT: endpoint.as_text()}

    def fileno(self) -> int:
        """Return a file descriptor that is readable as soon as anyone connects or sends."""
        return self._listener.fileno()

    def accept(self) -> list[tuple[Connection, Member]]:
        """Return new connections of ranks, without those of unauthenticated peers."""
        joined = self._listener.serve(time.monotonic())
        return [(_connection(channel), member) for channel, member in joined]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()


def take_endpoint(environment: MutableMapping[str, str]) -> Endpoint:
    """Return the endpoint in `Listener.environment`, and hide it from children."""
    return Endpoint.from_text(environment.pop(_ENDPOINT))


def connect(endpoint: Endpoint, rank: int, purpose: str) -> Connection:
    """Connect a rank for a purpose; raise ConnectionError if that is impossible."""
    host = socket.gethostname()
    channel = endpoint.join(Member(rank, purpose, host, os.getpid()))
    if channel is None:
        tried = ", ".join(f"{address} (port {port})" for address, port in endpoint.addresses)
        raise ConnectionError(f"rank {rank} on {host} cannot connect to any of these: {tried}")
    return _connection(channel)


def hang_up(connection: Connection) -> None:
    """Tell the other end that nothing more will come; it can still send to us."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_WR)


def _connection(channel: Channel) -> Connection:
    return Connection(channel.detach().detach())
