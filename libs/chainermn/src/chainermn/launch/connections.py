"""Connections from ranks to the process that has started them, on this host or on several.

Both ends prove that they know a key, so nobody else who reaches the port is listened to.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple, TypeVar

from chainermn.failures.channel import listen, own_addresses

T = TypeVar("T")

#: Names the job: every process of it inherits this variable.
JOB = "_CHAINERMN_RUN"
# Not an argument, because every user of a host sees the command lines of all.
_KEY = "_CHAINERMN_RUN_KEY"

_LOOPBACK = "127.0.0.1"
# Not every address of the caller leads there from every host.
_SECONDS_TO_CONNECT = 3.0
# Seconds for each end to wait for an answer, as the other may be neither a rank nor its caller. A
# rank waits while the caller deals with others.
_PATIENCE_OF_CALLER = 2
_PATIENCE_OF_RANK = 20
_FAILURES = (AuthenticationError, AssertionError, EOFError, OSError)


class Hello(NamedTuple):
    """What a rank says first on each of its connections."""

    rank: int
    purpose: str
    pid: int


class Listener:
    """Accepts connections of ranks: of those on this host only, unless ``hosts`` are given.

    Attributes
    ----------
    environment : dict of str to str
        The variables by which ranks find it.
    """

    def __init__(self, hosts: Sequence[object] | None) -> None:
        if hosts is None:
            self._socket = socket.create_server((_LOOPBACK, 0), backlog=1024)
            addresses = [_LOOPBACK]
        else:
            self._socket, addresses = listen(), own_addresses()
        self._key = secrets.token_bytes(32)
        port = self._socket.getsockname()[1]
        job = " ".join((secrets.token_hex(8), str(port), *addresses))
        self.environment = {JOB: job, _KEY: self._key.hex()}

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._socket.fileno()

    def accept(self) -> tuple[Connection, Hello] | None:
        """Return a connection and its first message; None unless it comes from a rank."""

        def greet(connection: Connection) -> Hello:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            return connection.recv()

        return _greeted(self._socket.accept()[0], greet, _PATIENCE_OF_CALLER)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()


@dataclass
class Invitation:
    """Where a rank connects to, and the key that it shows there."""

    addresses: Sequence[str]
    port: int
    key: bytes

    @classmethod
    def take_from(cls, environment: MutableMapping[str, str]) -> Invitation:
        """Return what `Listener.environment` says, and remove the key, which no child needs."""
        _, port, *addresses = environment[JOB].split()
        return cls(addresses, int(port), bytes.fromhex(environment.pop(_KEY)))

    def accept(self, rank: int, purpose: str) -> Connection:
        """Return a connection for a purpose; raise ConnectionError if none can be made."""

        def greet(connection: Connection) -> None:
            answer_challenge(connection, self.key)
            deliver_challenge(connection, self.key)
            connection.send(Hello(rank, purpose, os.getpid()))

        for address in self.addresses:
            try:
                made = socket.create_connection((address, self.port), timeout=_SECONDS_TO_CONNECT)
            except OSError:
                continue
            if greeted := _greeted(made, greet, _PATIENCE_OF_RANK):
                return greeted[0]
        raise ConnectionError(
            f"rank {rank} on {socket.gethostname()} can connect to none of these addresses: "
            f"{', '.join(self.addresses)} (port {self.port})"
        )


def hang_up(connection: Connection) -> None:
    """Let the other end know that nothing more comes; what it sends can still be received."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_WR)


def _greeted(
    made: socket.socket, greet: Callable[[Connection], T], patience: int
) -> tuple[Connection, T] | None:
    """Return the connection over a socket, and what ``greet`` returns; None if that fails."""
    with made:
        made.setblocking(True)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", patience, 0))
        connection = Connection(os.dup(made.fileno()))
        try:
            greeting = greet(connection)
        except _FAILURES:
            connection.close()
            return None
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        return connection, greeting
