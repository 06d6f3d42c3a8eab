"""Connections between ranks and the monitor."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from chainermn.failures import channel
from chainermn.failures.channel import Channel, connect, listen


def answer(listener: socket.socket, after: float) -> None:
    connection, _ = listener.accept()
    with connection:
        time.sleep(after)
        Channel(connection).send({"kind": "welcome"})


def test_answer_may_take_longer_than_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_SECONDS_TO_CONNECT", 0.2)
    with listen() as listener:
        thread = threading.Thread(target=answer, args=(listener, 1.0))
        thread.start()
        found = connect(["127.0.0.1"], listener.getsockname()[1], {"token": "x"})
        thread.join()
    assert found is not None
    found.close()


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_SECONDS_TO_ANSWER", 0.2)
    with listen() as listener:
        assert connect(["127.0.0.1"], listener.getsockname()[1], {"token": "x"}) is None


def test_nobody_listens() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]
    start = time.monotonic()
    assert connect(["127.0.0.1"], port, {"token": "x"}) is None
    assert time.monotonic() - start < channel._SECONDS_TO_ANSWER / 2


def test_first_of_several_addresses_to_answer() -> None:
    with listen() as listener:
        thread = threading.Thread(target=answer, args=(listener, 0.0))
        thread.start()
        # The first one is reserved for documentation, so nobody has it.
        addresses = ["192.0.2.1", "127.0.0.1"]
        found = connect(addresses, listener.getsockname()[1], {"token": "x"})
        thread.join()
    assert found is not None
    found.close()
