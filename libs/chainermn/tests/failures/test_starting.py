"""What is done to a process while it waits for the other ranks to start."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import threading
from typing import Any

import pytest

from chainermn.failures import guard, starting


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Let this process seem to be the first of two ranks; a sleep stands in for its guard."""
    started: list[subprocess.Popen[bytes]] = []

    def start(module: str, arguments: dict[str, Any]) -> subprocess.Popen[bytes]:
        assert module == "guard"
        assert arguments["limit"] == 2.5
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    monkeypatch.setenv("CHAINERMN_STALL_LIMIT", "2.5")
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(guard.watch, "is_on", lambda: False)
    monkeypatch.setattr(guard, "start_helper", start)
    return started


@pytest.fixture
def handler(request: pytest.FixtureRequest) -> Any:
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [None, ValueError("by design")])
def test_guard_is_there_meanwhile(error: Exception | None, guards: list[Any]) -> None:
    try:
        with starting():
            (process,) = guards
            assert process.poll() is None
            if error:
                raise error
    except ValueError as raised:
        assert raised is error
    assert process.poll() == -signal.SIGKILL
    assert faulthandler.is_enabled()


@pytest.mark.parametrize("why", ["alone", "watched already"])
def test_rank_that_needs_no_guard(
    why: str, guards: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "alone":
        monkeypatch.setenv("PMI_SIZE", "1")
        monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setattr(guard.watch, "is_on", lambda: True)
    with starting():
        assert guards == []


def test_guard_that_cannot_be_started(guards: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str, arguments: dict[str, Any]) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(guard, "start_helper", refuse)
    with starting():
        pass


@pytest.mark.parametrize(
    ("handler", "meanwhile"),
    [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)],
    indirect=["handler"],
)
def test_interrupts_meanwhile(handler: Any, meanwhile: Any, guards: list[Any]) -> None:
    with starting():
        assert signal.getsignal(signal.SIGINT) == meanwhile
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.parametrize("handler", [signal.default_int_handler], indirect=True)
def test_thread_leaves_interrupts_alone(handler: Any, guards: list[Any]) -> None:
    seen = []

    def start() -> None:
        with starting():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert seen == [handler]
