"""Send messages over TCP, because MPI may be stuck."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterable

from chainermn.connections.messages import Message, decode, encode

# Limit on unsent bytes: while the peer does not read, further messages are dropped.
_MOST_BYTES = 1 << 20
# Limit on the bytes read from a peer before it is trusted.
_MOST_BYTES_UNTRUSTED = 1 << 12


class MalformedError(ConnectionError):
    """Raised if the peer sends anything other than the expected messages."""


class Channel:
    """Sends and receives messages over a socket that may still be connecting.

    It never waits for the peer, and reads little from it until `trust` is called.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._incoming, self._outgoing = b"", b""
        self._n_received, self._is_trusted = 0, False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._socket.fileno()

    def check_connection(self) -> None:
        """Raise ConnectionError if the connection is lost, ConnectionRefusedError if refused."""
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            is_lost = error in (errno.ECONNRESET, errno.EPIPE)
            raise (ConnectionError if is_lost else ConnectionRefusedError)(os.strerror(error))

    def trust(self) -> None:
        """Let the peer send as much as it likes, because it belongs to the job."""
        self._is_trusted = True

    def send(self, message: Message) -> None:
        """Send a message. This never raises; `receive` does if the peer is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that `encode` has encoded, as `send` does."""
        with self._lock:
            if len(self._outgoing) < _MOST_BYTES:
                self._outgoing += data
        self.flush()

    def flush(self) -> None:
        """Send as many of the remaining bytes as the peer takes now."""
        with self._lock, contextlib.suppress(OSError):
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]

    def receive(
        self, kinds: Iterable[type[Message]], *, only_first: bool = False
    ) -> list[Message]:
        """Return the messages that have arrived, or at most the first one.

        Raises ConnectionError if the connection is closed, and MalformedError if the peer sends
        something other than messages of these types, or too much.
        """
        most = 1 << 16
        if not self._is_trusted:
            most = _MOST_BYTES_UNTRUSTED - self._n_received
            if most <= 0:
                raise MalformedError(
                    f"more than {_MOST_BYTES_UNTRUSTED} bytes from an unauthenticated peer"
                )
        try:
            part = self._socket.recv(most, socket.MSG_PEEK if only_first else 0)
            if only_first:
                part = self._socket.recv(part.find(b"\n") + 1 or len(part))
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not part:
            raise ConnectionError("closed by the peer")
        self._n_received += len(part)
        *lines, self._incoming = (self._incoming + part).split(b"\n")
        if len(self._incoming) > _MOST_BYTES:
            raise MalformedError(f"a message of more than {_MOST_BYTES} bytes")
        try:
            return [decode(line, kinds) for line in lines]
        except ValueError as error:
            raise MalformedError(str(error)) from error

    def detach(self) -> socket.socket:
        """End this channel, and return its socket for other uses."""
        self._socket.setblocking(True)
        return self._socket

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
