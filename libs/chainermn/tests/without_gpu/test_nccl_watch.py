"""The thread that ends a job if NCCL fails while nobody is calling it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from chainermn.transport.gpu import nccl_watch
from chainermn.transport.gpu.nccl_watch import NcclWatch, the_watch


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


def watch_of(*connections: Any) -> NcclWatch:
    watch = NcclWatch()
    for connection in connections:
        watch.add(connection)
    return watch


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
    now = [1.0]
    clock = SimpleNamespace(sleep=lambda _: now.append(now[-1] + 1), monotonic=lambda: now[-1])
    monkeypatch.setattr(nccl_watch, "time", clock)
    monkeypatch.setattr(nccl_watch, "end_job", end_job)
    connection = Connection(looks)
    watch = watch_of(connection)
    with pytest.raises(Ended):
        watch.run()
    expected = ["chainermn: NCCL failed\nEnding the whole job."] if is_ended else []
    assert messages == expected


def test_what_is_gone_is_watched_no_longer() -> None:
    failing = Connection("xx")
    watch = watch_of(failing)
    watch.add(Connection("x"))
    assert watch.first_failure() == "NCCL failed"
    del failing
    assert watch.first_failure() is None


@pytest.mark.mpi(1)
def test_one_watch_for_all() -> None:
    assert the_watch() is the_watch()
    (thread,) = (each for each in threading.enumerate() if each.name == "chainermn-nccl-watch")
    assert thread.daemon


def test_watch_outlives_errors_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    connections = [Connection("!."), Connection("..x"), Connection("...")]
    watch = watch_of(*connections)
    assert watch.first_failure() is None
    assert watch.first_failure() is None
    assert watch.first_failure() == "NCCL failed"
    told = capfd.readouterr().err
    assert "on rank 1 of 2, on " in told
    assert "a failure of NCCL may make the job hang from now on" in told
    assert told.count("AttributeError: another CuPy") == 1
