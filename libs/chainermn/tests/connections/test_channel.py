"""Messages over a connection, whatever the other end sends."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from chainermn.connections.channel import Channel, MalformedError
from chainermn.failures.messages import End, Failing

KINDS = (End, Failing)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """Return a channel and the socket at its other end."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as peer,
    ):
        channel = Channel(listening.accept()[0])
        yield channel, peer
        channel.close()


def receive(channel: Channel) -> list[object]:
    """Wait for messages, and return them."""
    while not (messages := channel.receive(KINDS)):
        pass
    return [*messages]


def test_what_follows_the_first_message_is_kept(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(b'["End", 1, "", ""]\n["Failing", "2"]\n["End", 3, "", ""]\n')
    while not (first := channel.receive(KINDS, only_first=True)):
        pass
    assert first == [End(1, "")]
    assert channel.receive(KINDS) == [Failing("2"), End(3, "")]
    assert channel.receive(KINDS) == []


def test_message_in_parts(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(b'["End", 1')
    while channel.receive(KINDS):
        pass
    peer.sendall(b'2, "", ""]\n')
    assert receive(channel) == [End(12, "")]


def test_little_is_read_before_authentication(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(b"x" * (1 << 16))
    with pytest.raises(MalformedError, match="more than 4096 bytes from an unauthenticated peer"):
        while True:
            channel.receive(KINDS)
    peer.shutdown(socket.SHUT_WR)
    with channel.detach() as unread, unread.makefile("rb") as file:
        assert len(file.read()) == (1 << 16) - 4096


def test_ranks_may_send_much_but_no_endless_message(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, peer = ends
    channel.trust()
    long = Failing("x" * 10_000)
    theirs = Channel(peer.dup())
    theirs.send(long)
    assert receive(channel) == [long]
    theirs.close()
    peer.setblocking(False)
    with pytest.raises(MalformedError, match="a message of more than 1048576 bytes"):
        while True:
            try:
                peer.send(b"x" * (1 << 16))
            except BlockingIOError:
                channel.receive(KINDS)


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", b'["End", "x"]\n', b'["Go"]\n'])
def test_not_a_message(line: bytes, ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(line)
    with pytest.raises(MalformedError, match="is not a message"):
        receive(channel)


def test_closed_by_the_peer(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.close()
    with pytest.raises(ConnectionError, match="closed by the peer"):
        receive(channel)
