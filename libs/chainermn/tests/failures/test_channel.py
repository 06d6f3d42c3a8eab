"""Connections between ranks and the monitor."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from chainermn.failures import channel
from chainermn.failures.channel import Channel, connect, listen


@contextmanager
def answering(listener: socket.socket, allowed: threading.Event) -> Iterator[None]:
    """Accept a connection in the ``with`` block, and answer to it once that is allowed."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            allowed.wait()
            Channel(connection).send({"kind": "welcome"})

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    thread.join()


def test_answer_may_take_longer_than_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = threading.Event()
    at_first = iter([0.0, 0.0])

    def clock() -> float:
        if (now := next(at_first, None)) is not None:
            return now
        allowed.set()
        return (channel._SECONDS_TO_CONNECT + channel._SECONDS_TO_ANSWER) / 2

    monkeypatch.setattr(channel, "monotonic", clock)
    with listen() as listener, answering(listener, allowed):
        found = connect(["127.0.0.1"], listener.getsockname()[1], {"token": "x"})
    assert found is not None
    found.close()


def test_what_follows_an_answer_is_kept() -> None:
    with listen() as listener:
        address = ("127.0.0.1", listener.getsockname()[1])
        rank = Channel(socket.create_connection(address))
        monitor = Channel(listener.accept()[0])
        for kind in ("welcome", "welcome", "end"):
            monitor.send({"kind": kind})
        assert rank.ask({"token": "x"})
        assert rank.ask({"token": "x", "rank": 1})
        assert rank.receive() == [{"kind": "end"}]
        rank.close()
        monitor.close()


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_SECONDS_TO_ANSWER", 0.2)
    with listen() as listener:
        assert connect(["127.0.0.1"], listener.getsockname()[1], {"token": "x"}) is None


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    # If it waited, it would wait forever.
    monkeypatch.setattr(channel, "monotonic", lambda: 0.0)
    with listen() as listener:
        port = listener.getsockname()[1]
    assert connect(["127.0.0.1"], port, {"token": "x"}) is None


def test_first_of_several_addresses_to_answer() -> None:
    allowed = threading.Event()
    allowed.set()
    with listen() as listener, answering(listener, allowed):
        # The first one is reserved for documentation, so nobody has it.
        addresses = ["192.0.2.1", "127.0.0.1"]
        found = connect(addresses, listener.getsockname()[1], {"token": "x"})
    assert found is not None
    found.close()


def test_address_that_means_nothing_here() -> None:
    allowed = threading.Event()
    allowed.set()
    with listen() as listener, answering(listener, allowed):
        addresses = ["fe80::1%missing", "127.0.0.1"]
        found = connect(addresses, listener.getsockname()[1], {"token": "x"})
    assert found is not None
    found.close()
