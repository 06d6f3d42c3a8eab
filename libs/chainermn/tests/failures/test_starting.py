"""What happens to a process while it waits for the other ranks to start."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from chainermn.failures import start_up, starting


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make this process look like the first of two ranks; return a log of its guard."""
    log: list[str] = []

    @contextlib.contextmanager
    def guarded(rank: int) -> Iterator[None]:
        log.append(f"rank {rank} is guarded")
        try:
            yield
        finally:
            log.append("no more")

    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(start_up.watch, "is_on", lambda: False)
    monkeypatch.setattr(start_up, "guarded", guarded)
    return log


@pytest.fixture
def handler(request: pytest.FixtureRequest) -> Any:
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [None, ValueError("by design")])
def test_guard_is_there_meanwhile(error: Exception | None, guards: list[str]) -> None:
    try:
        with starting():
            assert guards == ["rank 0 is guarded"]
            if error:
                raise error
    except ValueError as raised:
        assert raised is error
    assert guards == ["rank 0 is guarded", "no more"]
    assert faulthandler.is_enabled()


@pytest.mark.parametrize("why", ["alone", "watched already"])
def test_rank_that_needs_no_guard(
    why: str, guards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "alone":
        monkeypatch.setenv("PMI_SIZE", "1")
        monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setattr(start_up.watch, "is_on", lambda: True)
    with starting():
        assert guards == []


def test_guard_that_cannot_be_had(guards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rank: int) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(start_up, "guarded", refuse)
    with starting():
        pass


@pytest.mark.parametrize(
    ("handler", "meanwhile"),
    [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)],
    indirect=["handler"],
)
def test_interrupts_meanwhile(handler: Any, meanwhile: Any, guards: list[str]) -> None:
    with starting():
        assert signal.getsignal(signal.SIGINT) == meanwhile
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.parametrize("handler", [signal.default_int_handler], indirect=True)
def test_thread_leaves_interrupts_alone(handler: Any, guards: list[str]) -> None:
    seen = []

    def start() -> None:
        with starting():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_limit_that_is_no_number(guards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAINERMN_STALL_LIMIT", "a minute")
    with pytest.raises(ValueError, match="must be a number of seconds"), starting():
        pass
    assert guards == []
