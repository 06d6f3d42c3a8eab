"""The thread that ends a job if NCCL fails while nobody is calling it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator

import pytest

from chainermn.transport.gpu import nccl_watch


class Ended(BaseException):
    """Raised instead of ending the process."""


class Connection:
    """A connection that has failed at some of the ``looks``."""

    rank, size = 1, 2

    def __init__(self, looks: str) -> None:
        self._looks = iter(looks)

    def failure(self) -> str | None:
        look = next(self._looks, "?")
        if look == "?":
            raise Ended
        if look == "!":
            raise AttributeError("another CuPy")
        return "NCCL failed" if look == "x" else None


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Watch nothing from earlier tests, and start no thread."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(nccl_watch, "_watched", weakref.WeakSet())
    monkeypatch.setattr(threading.Thread, "start", lambda self: threads.append(self))
    nccl_watch._start.cache_clear()
    yield threads
    nccl_watch._start.cache_clear()


@pytest.mark.parametrize(
    ("looks", "is_ended"),
    [
        ("....", False),
        ("xxxx", False),  # NCCL may still raise where it is called
        ("xxxxx.xxxxx", False),
        ("..xxxxxxx", True),
        ("x.xxxxxxx", True),
    ],
)
def test_failure_that_stays_ends_the_job(
    looks: str, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []

    def end_job(message: str) -> None:
        messages.append(message)
        raise Ended

    # A second passes with each look.
    clock = itertools.count()
    now = [next(clock)]
    monkeypatch.setattr(nccl_watch, "end_job", end_job)
    monkeypatch.setattr(nccl_watch.time, "sleep", lambda _: now.append(next(clock)))
    monkeypatch.setattr(nccl_watch.time, "monotonic", lambda: 1.0 + now[-1])
    monkeypatch.setattr(nccl_watch, "_SECONDS_FOR_RAISING", 4.5)
    connection = Connection(looks)
    nccl_watch.watch(connection)
    with pytest.raises(Ended):
        nccl_watch._run()
    expected = ["chainermn: NCCL failed\nEnding the whole job."] if is_ended else []
    assert messages == expected


def test_what_is_gone_is_watched_no_longer() -> None:
    failing = Connection("xx")
    nccl_watch.watch(failing)
    nccl_watch.watch(Connection("x"))
    assert nccl_watch._first_failure() == "NCCL failed"
    del failing
    assert nccl_watch._first_failure() is None


def test_one_watch_for_all(started: list[threading.Thread]) -> None:
    connections = [Connection("."), Connection("x")]
    for connection in connections:
        nccl_watch.watch(connection)
    (thread,) = started
    assert thread.daemon
    assert nccl_watch._first_failure() == "NCCL failed"


def test_watch_outlives_errors_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    connections = [Connection("!."), Connection("..x"), Connection("...")]
    for connection in connections:
        nccl_watch.watch(connection)
    assert nccl_watch._first_failure() is None
    assert nccl_watch._first_failure() is None
    assert nccl_watch._first_failure() == "NCCL failed"
    told = capfd.readouterr().err
    assert "on rank 1 of 2, on " in told
    assert "a failure of NCCL may make the job hang from now on" in told
    assert told.count("AttributeError: another CuPy") == 1
