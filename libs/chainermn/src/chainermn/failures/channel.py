"""Connections between the ranks and the monitor: TCP, because MPI may be stuck."""

from __future__ import annotations

import contextlib
import fcntl
import json
import selectors
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Any, TypeAlias, cast

Message: TypeAlias = dict[str, Any]

# Messages beyond this are dropped while the peer does not read.
_MOST_BYTES = 1 << 20
# The peer's kernel accepts a connection; only its process, which may be starting, answers.
_SECONDS_TO_CONNECT = 3.0
_SECONDS_TO_ANSWER = 30.0
_SIOCGIFADDR = 0x8915


class Channel:
    """Messages over a socket that may still be connecting, each a line of JSON.

    Only `ask` waits for the peer.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._incoming, self._outgoing = b"", b""
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._socket.fileno()

    def is_connected(self) -> bool:
        """Tell whether connecting has succeeded; to be asked once it has ended."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0

    def send(self, message: Message) -> None:
        """Send a message; never raises: `receive` does if the peer is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send what `encode` has returned, as `send` does."""
        with self._lock:
            if len(self._outgoing) < _MOST_BYTES:
                self._outgoing += data
        self.flush()

    def flush(self) -> None:
        """Send as much as the peer takes now of what it has not taken yet."""
        with self._lock, contextlib.suppress(OSError):
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]

    def receive(self, *, only_first: bool = False) -> list[Message]:
        """Return the messages that have arrived, or at most the first one.

        Raises ConnectionError if the connection is closed, or anything except messages comes.
        """
        try:
            part = self._socket.recv(1 << 16, socket.MSG_PEEK if only_first else 0)
            if only_first:
                part = self._socket.recv(part.find(b"\n") + 1 or len(part))
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not part:
            raise ConnectionError("closed by the peer")
        *lines, self._incoming = (self._incoming + part).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            raise ConnectionError(f"not a message: {error}") from error
        if len(self._incoming) > _MOST_BYTES or not all(isinstance(m, dict) for m in messages):
            raise ConnectionError("not a message")
        return messages

    def ask(self, question: Message) -> bool:
        """Send a message, and tell whether an answer comes before the timeout."""
        self.send(question)
        return _first_to_answer([self]) is not None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def encode(message: Message) -> bytes:
    """Return what travels for a message."""
    return json.dumps(message).encode() + b"\n"


def listen() -> socket.socket:
    """Return a socket that accepts connections on all addresses of this host."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
    return socket.create_server(("", 0), backlog=1024)


def own_addresses() -> list[str]:
    """Return the addresses under which other hosts may reach this one."""
    found = list(_interface_addresses())
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    return list(dict.fromkeys(found))


def connect(addresses: Iterable[str], port: int, hello: Message) -> Channel | None:
    """Connect to the first address that answers to ``hello``; return None if none does."""
    candidates: list[Channel] = []
    for address in addresses:
        with contextlib.suppress(OSError):  # no such network here
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            candidates.append(Channel(connection))
            connection.connect_ex((address, port))
    for candidate in candidates:
        candidate.send(hello)
    winner = _first_to_answer(candidates)
    for candidate in candidates:
        if candidate is not winner:
            candidate.close()
    return winner


def _first_to_answer(candidates: list[Channel]) -> Channel | None:
    start = monotonic()
    deadline = start + _SECONDS_TO_CONNECT
    with selectors.DefaultSelector() as selector:
        for channel in candidates:
            selector.register(channel, selectors.EVENT_WRITE)
        while selector.get_map() and (left := deadline - monotonic()) > 0:
            for key, events in selector.select(left):
                channel = cast(Channel, key.fileobj)
                if channel.is_connected():
                    deadline = start + _SECONDS_TO_ANSWER
                channel.flush()
                selector.modify(channel, selectors.EVENT_READ)
                try:
                    # What follows the answer is for those who read later.
                    if events & selectors.EVENT_READ and channel.receive(only_first=True):
                        return channel
                except ConnectionError:
                    selector.unregister(channel)
    return None


def _interface_addresses() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                yield socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
