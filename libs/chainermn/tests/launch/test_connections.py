"""Who is listened to: ranks that know the key, and nobody else."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from chainermn.launch import connections
from chainermn.launch.connections import Hello, Invitation, Listener


@pytest.mark.parametrize("hosts", [None, [("a", 1), ("b", 1)]])
def test_rank_is_heard(hosts: list[tuple[str, int]] | None) -> None:
    with Listener(hosts) as listener, ThreadPoolExecutor(1) as threads:
        environment = dict(listener.environment)
        invitation = Invitation.take_from(environment)
        assert invitation.key.hex() not in str(environment)
        on_rank = threads.submit(invitation.accept, 3, "call")
        accepted = listener.accept()
        assert accepted is not None
        with on_rank.result() as theirs, accepted[0] as ours:
            assert isinstance(accepted[1], Hello)
            assert accepted[1][:2] == (3, "call")
            theirs.send_bytes(b"result")
            assert ours.recv_bytes() == b"result"


def test_only_this_host_is_listened_to_unless_there_are_others() -> None:
    with Listener(None) as listener:
        assert Invitation.take_from(listener.environment).addresses == ["127.0.0.1"]
        assert listener._socket.getsockname()[0] == "127.0.0.1"


def test_other_key_is_refused_on_both_ends() -> None:
    with Listener(None) as listener, ThreadPoolExecutor(1) as threads:
        invitation = Invitation.take_from(dict(listener.environment))
        invitation.key = b"x" * 32
        on_rank = threads.submit(invitation.accept, 0, "call")
        assert listener.accept() is None
        with pytest.raises(ConnectionError, match=r"rank 0 on .* can connect to none of these"):
            on_rank.result()


def test_stranger_that_says_nothing_or_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PATIENCE_OF_CALLER", 1)
    with Listener(None) as listener:
        address = listener._socket.getsockname()
        with socket.create_connection(address):
            assert listener.accept() is None
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert listener.accept() is None


def test_no_caller() -> None:
    with Listener(None) as listener:
        invitation = Invitation.take_from(dict(listener.environment))
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1 \(port {invitation.port}\)"):
        invitation.accept(1, "call")
