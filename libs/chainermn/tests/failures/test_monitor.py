"""What the monitor hears of ranks, and tells them. It runs in a thread; the ranks are channels."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chainermn.failures import monitor
from chainermn.failures.channel import Message, connect, listen
from chainermn.failures.invitation import Invitation
from chainermn.failures.monitor import Monitor
from chainermn.failures.processes import Process, find

STREAM = "communicator 1 of ranks 0-1"
TOKEN = {"token": "secret"}
TIMEOUT = 60.0
PERIOD = 0.05


class Rank:
    """The connection of a rank that has joined."""

    def __init__(self, port: int, number: int) -> None:
        channel = connect(["127.0.0.1"], port, TOKEN)
        assert channel is not None
        self.channel = channel
        self._heard: list[Message] = []
        self.all: list[Message] = []
        channel.send({**TOKEN, "rank": number, "host": "here", "pid": 100 + number})
        self.hear("welcome")

    def report(self, **what: Any) -> None:
        nothing: Message = {"main": None, "others": [], "counts": {}, "place": "", "left": False}
        self.channel.send({"kind": "report", **nothing, **what})

    def hear(self, kind: str) -> Message:
        """Wait for the next message of this kind."""
        deadline = time.monotonic() + TIMEOUT
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            while True:
                for number, message in enumerate(self._heard):
                    if message["kind"] == kind:
                        del self._heard[: number + 1]
                        return message
                assert selector.select(deadline - time.monotonic()), kind
                self._heard = self.channel.receive()
                self.all += self._heard


class Clock:
    """One on which time passes when a test says so."""

    now = 0.0

    def read(self) -> float:
        return self.now


class Running:
    """A monitor in a thread."""

    def __init__(self, limit: float, starter: int, clock: Clock | None) -> None:
        listener = listen()
        self.port = listener.getsockname()[1]
        invitation = Invitation("here", ["127.0.0.1"], self.port, "secret", limit, PERIOD)
        self._monitor = Monitor(listener, invitation, find(starter))
        self._clock = clock
        if clock is not None:
            self._monitor._clock = clock  # type: ignore[assignment]
        self._n_looks = 0
        really_judge = self._monitor._judge

        def judge() -> None:
            really_judge()
            self._n_looks += 1

        self._monitor._judge = judge  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._monitor.run, daemon=True)
        self._thread.start()
        self._ranks: list[Rank] = []

    def join(self, n_ranks: int) -> list[Rank]:
        self._ranks = [Rank(self.port, number) for number in range(n_ranks)]
        return self._ranks

    def wait_until_heard(self, rank: int, at: float) -> None:
        """Wait until it has taken note of what a rank has sent at this time on its clock."""
        members = self._monitor._members
        while (rank, at) not in [(m.rank, m.heard_at) for m in list(members.values())]:
            time.sleep(0.01)

    def judge(self, reports: dict[int, Message]) -> None:
        """Let ranks report, and the clock go on until that is noted and judged."""
        now = self.look_again()
        for rank, report in reports.items():
            self._ranks[rank].report(**report)
            self.wait_until_heard(rank, now)
        self.look_again()

    def look_again(self) -> float:
        """Let the clock go on for a period, until what is known then has been judged."""
        assert self._clock is not None
        before = self._n_looks
        self._clock.now += PERIOD
        while self._n_looks == before:
            time.sleep(0.01)
        return self._clock.now

    def wait(self) -> None:
        """Wait until the monitor has ended."""
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """Do what the end of the process does."""
        for rank in self._ranks:
            rank.channel.close()
        self.wait()
        selector = self._monitor._selector
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        selector.close()
        if self._monitor._ends is not None:
            self._monitor._ends.close()


Start = Callable[..., Running]


def wait_for_stderr(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Wait until this has been written to standard error."""
    deadline = time.monotonic() + TIMEOUT
    said = ""
    while text not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
        said += capfd.readouterr().err


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Return what takes the place of the mpiexec that may run these tests."""
    found: list[Process] = []
    monkeypatch.setattr(monitor, "launchers_of", lambda pid: found)
    return found


@pytest.fixture
def start(launchers: list[Process]) -> Iterator[Start]:
    started: list[Running] = []

    def begin(
        limit: float = 0.0, starter: int | None = None, clock: Clock | None = None
    ) -> Running:
        started.append(Running(limit, os.getpid() if starter is None else starter, clock))
        return started[-1]

    yield begin
    for running in started:
        running.close()


def test_ranks_may_go_once_all_have_left(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    running = start()
    first, second = running.join(2)
    first.report(left=True)
    first.hear("tick")
    second.report(left=True)
    first.hear("go")
    second.hear("go")
    first.channel.close()
    second.channel.close()
    running.wait()
    assert capfd.readouterr().err == ""


def test_ranks_may_be_ended_once_one_has_said_so(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    running = start()
    first, second = running.join(2)
    second.channel.send({"kind": "stop"})
    second.channel.close()
    assert first.hear("tick") == first.hear("tick") == {"kind": "tick"}
    first.channel.close()
    running.wait()
    assert capfd.readouterr().err == ""


def test_rank_that_is_gone_without_a_word(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    first, second = start(clock=clock).join(2)
    second.channel.close()
    wait_for_stderr("rank 1 on here (process 101) is the first to be gone", capfd)
    clock.now = 1.0  # until then mpiexec may end the job by itself
    assert first.hear("end")["first"] == 0


def test_rank_that_says_what_has_failed_ends_the_job(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, third = start().join(3)
    third.channel.send({"kind": "failing", "reason": "that of 2"})
    second.channel.send({"kind": "failing", "reason": "that of 1"})  # too late: not the first
    ends = [rank.hear("end") for rank in (first, second, third)]
    assert ends[0]["first"] in (1, 2)
    for end in ends:
        expected = {"first": ends[0]["first"], "reason": f"that of {ends[0]['first']}"}
        assert end == {"kind": "end", **expected}
    assert capfd.readouterr().err == ""


def test_rank_that_waits_for_one_that_has_left(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = start().join(2)
    second.report(left=True)
    first.report(main=[STREAM, 3, "allreduce", "0-1", 0.5, ""], place="train.py:7")
    first.hear("end")
    second.hear("end")
    said = capfd.readouterr().err
    assert "rank 1 on here has ended its script" in said
    assert "allreduce (call 3 on communicator 1 of ranks 0-1)" in said
    assert "rank 0 on here, which has been in allreduce" in said
    assert said.count("The whole job is being ended.") == 1


def test_same_thing_is_warned_of_once(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    running = start(limit=1000.0, clock=Clock())
    running.join(2)
    waits = {"main": [STREAM, 3, "allreduce", "0-1", 1500.0, ""]}
    for _ in range(3):
        running.judge({0: waits, 1: {"place": "train.py:7", "counts": {STREAM: 2}}})
    said = capfd.readouterr().err
    assert said.count("ranks have waited for 150") == 1
    assert "HAS NOT come: rank 1 on here, which is at train.py:7" in said


def test_calls_of_other_threads_count(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    running = start(clock=clock)
    first, _ = running.join(2)
    call = [STREAM, 3, "allreduce", "0-1", 0.5, ""]
    running.judge({1: {"left": True, "others": [call]}, 0: {"main": call}})
    running.judge({1: {"left": True, "counts": {STREAM: 3}}})
    assert capfd.readouterr().err == ""
    first.report(main=[STREAM, 4, "bcast", "0-1", 0.5, ""])
    running.wait_until_heard(0, clock.now)
    clock.now += PERIOD
    wait_for_stderr("bcast (call 4 on", capfd)


def test_ranks_hear_ten_times_within_the_limit_that_it_is_there(start: Start) -> None:
    running = start(limit=100 * PERIOD, clock=Clock())
    running.look_again()  # the first tick, which nobody hears
    (rank,) = running.join(1)
    for _ in range(25):
        running.look_again()
    rank.report(left=True)
    rank.hear("go")
    assert [message["kind"] for message in rank.all].count("tick") == 2


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open as many files as the system allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_one_of_512_ranks_is_named_in_a_short_message(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = "communicator 1 of ranks 0-511"
    running = start(clock=Clock())
    call = {"main": [stream, 3, "allreduce", "0-511", 0.5, ""], "counts": {stream: 3}}
    running.join(512)
    running.judge({rank: call for rank in range(512) if rank != 300})
    assert capfd.readouterr().err == ""
    running.judge({300: {"left": True, "counts": {stream: 2}}})
    said = capfd.readouterr().err
    assert said.startswith(
        "chainermn: rank 300 on here has ended its script, or called sys.exit, while others wait "
        "for it:\n  allreduce (call 3 on communicator 1 of ranks 0-511)\n"
        "    HAS NOT come: rank 300 on here, which has ended its script\n"
        "    has come: rank 0 on here, which has been in allreduce"
    )
    assert "\n  and 496 more\n" in said
    assert len(said.splitlines()) < 25


def test_silent_rank_is_not_the_one_to_end_the_job(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    running = start(limit=2.0, clock=clock)
    _, second = running.join(2)
    for now in (1.9, 3.0):
        clock.now = now
        second.report()
        running.wait_until_heard(1, now)
    wait_for_stderr("rank 0 on here (process 100) has been silent for 3 s", capfd)
    clock.now = 3.5
    assert second.hear("end")["first"] == 1


def test_strangers_are_not_listened_to(start: Start) -> None:
    running = start()
    first, _ = running.join(2)
    assert connect(["127.0.0.1"], running.port, {"token": "of another job"}) is None
    assert connect(["127.0.0.1"], running.port, {"kind": "failing"}) is None
    guest = connect(["127.0.0.1"], running.port, TOKEN)
    assert guest is not None
    guest.close()  # before it has joined: nobody misses it
    assert first.hear("tick") == first.hear("tick") == {"kind": "tick"}


def test_nobody_comes_and_the_rank_that_started_it_ends(start: Start) -> None:
    with subprocess.Popen(["sleep", "600"]) as starter:
        running = start(starter=starter.pid)
        starter.kill()
    running.wait()


@pytest.mark.parametrize(("name", "is_killed"), [("hydra_pmi_proxy", True), ("prterun", False)])
def test_all_are_gone_at_once(
    name: str, is_killed: bool, start: Start, launchers: list[Process], tmp_path: Path
) -> None:
    launcher = tmp_path / name
    launcher.write_text("#!/bin/sh\nread -r line\n")
    launcher.chmod(0o755)
    with subprocess.Popen([launcher], stdin=subprocess.PIPE) as process:
        while (found := find(process.pid)) is None or found.name != name:
            time.sleep(0.01)
        launchers.append(found)
        running = start(clock=Clock())
        for rank in running.join(2):
            rank.channel.close()
        running.wait()
        if not is_killed:  # that of Open MPI needs no help
            process.communicate(b"\n")
        assert process.wait(TIMEOUT) == (-signal.SIGKILL if is_killed else 0)


def test_a_rank_has_joined_only_when_the_monitor_says_so() -> None:
    # Otherwise ranks that end early would be taken for all there are.
    said: list[bytes] = []

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            for _ in range(2):
                said.append(connection.recv(1 << 12))
                time.sleep(0.3)
                said.append(b"welcome")
                connection.send(b'{"kind": "welcome"}\n')

    with listen() as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        invitation = Invitation("here", ["127.0.0.1"], port, "secret", 10.0, PERIOD)
        channel = invitation.accept(3)
        assert channel is not None
        assert said[1::2] == [b"welcome"] * 2
        assert b'"rank": 3' in said[2]
        thread.join()
        channel.close()
