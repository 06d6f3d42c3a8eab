"""What the watch tells the launcher of a job, and that it does not need one."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from chainermn.connections.joining import LOOPBACK, Endpoint
from chainermn.connections.messages import Address, Message
from chainermn.failures.launcher import GUARD, LAUNCHER, MONITOR, RANK, connect, tell_end
from chainermn.failures.messages import End, Go, Tick

HOST = os.uname().nodename
Launcher = Callable[[], str | None]


@pytest.mark.parametrize("lost", ["b", ""])
def test_first_to_tell_that_the_job_ends_is_believed(lost: str, launcher: Launcher) -> None:
    tell_end(GUARD, lost)
    tell_end(RANK, "too late")
    assert launcher() == lost


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([Tick()], HOST),  # the monitor has been killed
        ([Tick(), Go(), End(0, "", "b")], None),
        ([Tick(), End(0, "", "b"), Go()], "b"),
    ],
)
def test_monitor_must_say_how_the_job_ends(
    messages: list[Message], expected: str | None, launcher: Launcher
) -> None:
    channel = connect(MONITOR)
    assert channel is not None
    for message in messages:
        channel.send(message)
    channel.close()
    assert launcher() == expected


NOBODY = Endpoint([Address(LOOPBACK, 1)], "00").as_text()


@pytest.mark.parametrize("text", [None, "", "[]", NOBODY])
def test_no_launcher_listens(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.delenv(LAUNCHER, raising=False)
    if text is not None:
        monkeypatch.setenv(LAUNCHER, text)
    assert connect(MONITOR) is None
    tell_end(RANK, "b")
