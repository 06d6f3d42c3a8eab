"""Connections from ranks to the process that has started them, on this host or on several."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import MutableMapping, Sequence
from multiprocessing.connection import Connection

from chainermn.failures import joining
from chainermn.failures.channel import Channel
from chainermn.failures.joining import LOOPBACK, Entrance, listen, own_addresses
from chainermn.failures.messages import Address, Member

#: Names the job: every process of it inherits this variable.
JOB = "_CHAINERMN_RUN"
# Not an argument, because every user of a host sees the command lines of all.
_KEY = "_CHAINERMN_RUN_KEY"

#: What each rank connects for, in this order.
PURPOSES = ("stdout", "stderr", "call")


class Listener:
    """Accepts connections of ranks: of those on this host only, unless ``hosts`` are given.

    It listens until each of ``size`` ranks has one for each of the `PURPOSES`.

    Attributes
    ----------
    environment : dict of str to str
        The variables by which ranks find it.
    """

    def __init__(self, size: int, hosts: Sequence[object] | None) -> None:
        sockets = listen([LOOPBACK] if hosts is None else own_addresses())
        addresses, key = Entrance.to(sockets)
        self._listener = joining.Listener(sockets, key, range(size), PURPOSES)
        places = [f"{address} {port}" for address, port in addresses]
        self.environment = {JOB: " ".join((secrets.token_hex(8), *places)), _KEY: key}

    def fileno(self) -> int:
        """Return a file descriptor that can be read as soon as somebody connects or speaks."""
        return self._listener.fileno()

    def accept(self) -> list[tuple[Connection, Member]]:
        """Return new connections of ranks; strangers are none."""
        joined = self._listener.serve(time.monotonic())
        return [(_connection(channel), member) for channel, member in joined]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()


def take_entrance(environment: MutableMapping[str, str]) -> Entrance:
    """Return what `Listener.environment` says, and remove the key, which no child needs."""
    _, *places = environment[JOB].split()
    addresses = map(Address, places[::2], map(int, places[1::2]))
    return Entrance([*addresses], environment.pop(_KEY))


def connect(entrance: Entrance, rank: int, purpose: str) -> Connection:
    """Return a rank's connection for a purpose; raise ConnectionError if none can be made."""
    host = socket.gethostname()
    channel = entrance.enter(Member(rank, purpose, host, os.getpid()))
    if channel is None:
        tried = ", ".join(f"{address} (port {port})" for address, port in entrance.addresses)
        raise ConnectionError(f"rank {rank} on {host} can connect to none of these: {tried}")
    return _connection(channel)


def hang_up(connection: Connection) -> None:
    """Let the other end know that nothing more comes; what it sends can still be received."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_WR)


def _connection(channel: Channel) -> Connection:
    return Connection(channel.detach().detach())
