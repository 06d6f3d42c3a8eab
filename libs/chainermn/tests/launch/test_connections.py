"""How ranks connect to the process that started them. For strangers, see test_joining.py."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from chainermn.launch.connections import Listener, connect, take_endpoint


@pytest.mark.parametrize("hosts", [None, [("a", 1), ("b", 1)]])
def test_rank_is_heard(hosts: list[tuple[str, int]] | None) -> None:
    with Listener(4, hosts) as listener, ThreadPoolExecutor(1) as threads:
        environment = dict(listener.environment)
        endpoint = take_endpoint(environment)
        assert endpoint.key not in str(environment)
        on_rank = threads.submit(connect, endpoint, 3, "call")
        while not (accepted := listener.accept()):
            time.sleep(0.001)
        ((ours, member),) = accepted
        assert member[:2] == (3, "call")
        with on_rank.result() as theirs, ours:
            theirs.send_bytes(b"result")
            assert ours.recv_bytes() == b"result"


def test_only_this_host_is_listened_to_unless_there_are_others() -> None:
    with Listener(1, None) as listener:
        ((address, _),) = take_endpoint(listener.environment).addresses
        assert address == "127.0.0.1"


def test_no_caller() -> None:
    with Listener(2, None) as listener:
        endpoint = take_endpoint(dict(listener.environment))
    ((_, port),) = endpoint.addresses
    with pytest.raises(ConnectionError, match=rf"any of these: 127\.0\.0\.1 \(port {port}\)"):
        connect(endpoint, 1, "call")
