"""What the monitor hears from ranks and tells them. It runs in a thread; ranks are channels."""

from __future__ import annotations

import errno
import os
import resource
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from chainermn.connections.joining import LOOPBACK, Endpoint, listen
from chainermn.connections.messages import Address, Member, Message, encode
from chainermn.failures import monitor
from chainermn.failures.ending import use_terminal
from chainermn.failures.group_signals import GroupSignals
from chainermn.failures.judgment import Judge, RankState, Verdict
from chainermn.failures.messages import (
    OF_MONITOR,
    Absent,
    End,
    Expect,
    Failing,
    Go,
    Listening,
    Report,
    Stop,
    Tick,
)
from chainermn.failures.monitor import Monitor
from chainermn.failures.settings import PURPOSE, WatchSettings
from chainermn.failures.wait import Wait
from chainermn.process.processes import Process, find
from libs.chainermn.tests.failures.conftest import select_with
from libs.chainermn.tests.process.stand_in_job import named

STREAM = "communicator 1 of ranks 0-1"
TIMEOUT = 60.0
PERIOD = 0.05

M = TypeVar("M")


class Rank:
    """The connection of a rank that has joined."""

    def __init__(self, endpoint: Endpoint, number: int) -> None:
        channel = endpoint.join(Member(number, PURPOSE, "here", 100 + number))
        assert channel is not None
        self.channel = channel
        self._heard: list[Message] = []
        self.all: list[Message] = []

    def report(self, **what: Any) -> None:
        self.channel.send(Report(None, [], {}, "", False)._replace(**what))

    def hear(self, kind: type[M]) -> M:
        """Wait for the next message of this kind."""
        deadline = time.monotonic() + TIMEOUT
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            while True:
                for number, message in enumerate(self._heard):
                    if isinstance(message, kind):
                        del self._heard[: number + 1]
                        return message
                assert selector.select(deadline - time.monotonic()), kind
                self._heard = self.channel.receive(OF_MONITOR)
                self.all += self._heard


class Clock:
    """A clock that only the test moves."""

    now = 0.0

    def read(self) -> float:
        return self.now


class Running:
    """A monitor in a thread."""

    def __init__(
        self,
        expected: int,
        size: int,
        limit: float,
        starter: int,
        clock: Clock | None,
        has_terminal: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        sockets = listen([LOOPBACK])
        self.endpoint = Endpoint.of(sockets)
        ranks = f"0-{expected - 1}"
        settings = WatchSettings(
            "here", self.endpoint, ranks, size, limit, PERIOD, has_terminal=has_terminal
        )
        self._clock = clock
        self._n_looks = 0
        # The states of the ranks, once the monitor has looked at them.
        self._states: Iterable[RankState] = ()
        self._selector = selectors.DefaultSelector()
        select_with(self._selector, monitor, monkeypatch)
        monkeypatch.setattr(monitor, "Judge", self._note)
        if clock is not None:
            monkeypatch.setattr(monitor, "AwakeClock", lambda longest_step: clock)
        self._signals = os.pipe()
        running = Monitor(sockets, settings, find(starter), GroupSignals(self._signals[0]))
        self._thread = threading.Thread(target=running.run, daemon=True)
        self._thread.start()
        self._ranks: list[Rank] = []

    def _note(self, states: Iterable[RankState], now: float, limit: float) -> SimpleNamespace:
        """Judge as the monitor does, and note what it sees and when it has heard the verdicts."""

        def verdicts() -> Iterator[Verdict]:
            try:
                yield from Judge(states, now, limit).verdicts()
            finally:
                self._n_looks += 1

        self._states = states
        return SimpleNamespace(verdicts=verdicts)

    def signal(self, *numbers: int) -> None:
        """Let the monitor hear that its whole process group got these signals."""
        os.write(self._signals[1], bytes(numbers))

    def join(self, n_ranks: int) -> list[Rank]:
        self._ranks = [Rank(self.endpoint, number) for number in range(n_ranks)]
        return self._ranks

    def wait_until_heard(self, rank: int, at: float) -> None:
        """Wait until the monitor has noted what a rank sent at this time on its clock."""
        while (rank, at) not in [(it.rank, it.heard_at) for it in list(self._states)]:
            time.sleep(0.01)

    def judge(self, reports: dict[int, dict[str, Any]]) -> None:
        """Let ranks report, and advance the clock until the reports are noted and judged."""
        now = self.look_again()
        for rank, report in reports.items():
            self._ranks[rank].report(**report)
            self.wait_until_heard(rank, now)
        self.look_again()

    def look_again(self) -> float:
        """Advance the clock by one period, wait for the next verdicts, and return the time."""
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
        """Close everything, as the end of the process would."""
        for rank in self._ranks:
            rank.channel.close()
        self.wait()
        for key in self._selector.get_map().values():
            if not isinstance(key.fileobj, GroupSignals):
                cast(Any, key.fileobj).close()
        for end in self._signals:
            os.close(end)


Start = Callable[..., Running]
Said = Callable[[], str]
# Waits for the end of the job; see `launcher`.
Launcher = Callable[[], str | None]


def wait_for_stderr(text: str, said: Said) -> str:
    """Wait until a text has been written to standard error; return all that was written."""
    deadline = time.monotonic() + TIMEOUT
    message = ""
    while text not in message:
        assert time.monotonic() < deadline, message
        time.sleep(0.01)
        message += said()
    return message


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Return the launchers to find, in place of any mpiexec that runs these tests."""
    found: list[Process] = []
    monkeypatch.setattr(monitor, "launchers_of", lambda pid: found)
    return found


@pytest.fixture
def start(launchers: list[Process], monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started: list[Running] = []

    def begin(
        expected: int = 2,
        size: int | None = None,
        limit: float = 0.0,
        starter: int | None = None,
        clock: Clock | None = None,
        has_terminal: bool = False,
    ) -> Running:
        parent = os.getpid() if starter is None else starter
        started.append(
            Running(expected, size or expected, limit, parent, clock, has_terminal, monkeypatch)
        )
        return started[-1]

    yield begin
    for running in started:
        running.close()
    use_terminal(False)


def test_ranks_may_go_once_all_have_left(start: Start, said: Said, launcher: Launcher) -> None:
    running = start()
    first, second = running.join(2)
    first.report(left=True)
    first.hear(Tick)
    second.report(left=True)
    first.hear(Go)
    second.hear(Go)
    first.channel.close()
    second.channel.close()
    running.wait()
    assert said() == ""
    assert launcher() is None


def test_ranks_may_be_ended_once_one_has_said_so(
    start: Start, said: Said, launcher: Launcher
) -> None:
    running = start()
    first, second = running.join(2)
    second.channel.send(Stop())
    second.channel.close()
    assert first.hear(Tick) == first.hear(Tick)
    first.channel.close()
    running.wait()
    assert said() == ""
    assert launcher() is None


def test_rank_that_is_gone_without_a_word(start: Start, said: Said, launcher: Launcher) -> None:
    clock = Clock()
    first, second = start(clock=clock).join(2)
    second.channel.close()
    wait_for_stderr("rank 1 on here (process 101) disappeared first", said)
    clock.now = 1.0  # until then mpiexec may end the job by itself
    assert first.hear(End) == End(0, "", "here")
    assert launcher() == "here"


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGCONT, signal.SIGTERM]])
def test_job_that_gets_a_signal_blames_no_rank(
    numbers: list[int], start: Start, said: Said
) -> None:
    running = start(clock=Clock())
    ranks = running.join(2)
    for number in numbers:
        running.signal(number)
        running.look_again()
    assert said() == ""  # ranks may handle the signal
    for rank in ranks:
        rank.channel.close()
    message = wait_for_stderr("Ending the whole job.", said)
    assert message.startswith("chainermn: mpiexec, or the whole job, got SIGTERM or SIGHUP, for")


def test_rank_whose_loss_makes_mpiexec_end_the_others(start: Start, said: Said) -> None:
    running = start()
    _, second = running.join(2)
    second.hear(Tick)
    second.channel.close()
    running.signal(signal.SIGCONT, signal.SIGTERM)
    wait_for_stderr("rank 1 on here (process 101) disappeared first", said)


def test_rank_that_says_what_has_failed_ends_the_job(
    start: Start, said: Said, launcher: Launcher
) -> None:
    first, second, third = start(3).join(3)
    third.channel.send(Failing("that of 2"))
    second.channel.send(Failing("that of 1"))  # whichever comes second is too late
    ends = [rank.hear(End) for rank in (first, second, third)]
    assert ends[0].first in (1, 2)
    assert ends == [End(ends[0].first, f"that of {ends[0].first}")] * 3
    assert said() == ""
    assert launcher() == ""


def test_rank_that_waits_for_one_that_has_left(start: Start, said: Said) -> None:
    first, second = start().join(2)
    second.report(left=True)
    first.report(main=Wait(STREAM, 3, "allreduce", "0-1", 0.5), place="train.py:7")
    first.hear(End)
    second.hear(End)
    message = said()
    assert "rank 1 on here has ended its script" in message
    assert "allreduce (call 3 on communicator 1 of ranks 0-1)" in message
    assert "rank 0 on here, which has been in allreduce" in message
    assert message.count("Ending the whole job.") == 1


@pytest.mark.parametrize("has_terminal", [False, True])
def test_message_that_may_follow_a_live_view(has_terminal: bool, start: Start, said: Said) -> None:
    clock = Clock()
    first, second = start(clock=clock, has_terminal=has_terminal).join(2)
    second.channel.close()
    shown = wait_for_stderr("Ending the whole job.", said)
    clock.now = 1.0
    first.hear(End)
    before, message, _ = shown.partition("chainermn: rank 1 on here")
    assert message
    assert before.endswith("\n\033[J") == has_terminal
    assert not before or has_terminal


def test_same_thing_is_warned_of_once(start: Start, said: Said) -> None:
    running = start(limit=1000.0, clock=Clock())
    running.join(2)
    waits = {"main": Wait(STREAM, 3, "allreduce", "0-1", 1500.0)}
    for _ in range(3):
        running.judge({0: waits, 1: {"place": "train.py:7", "counts": {STREAM: 2}}})
    message = said()
    assert message.count("ranks have waited 150") == 1
    assert "HAS NOT arrived: rank 1 on here, which is at train.py:7" in message


def test_calls_of_other_threads_count(start: Start, said: Said) -> None:
    clock = Clock()
    running = start(clock=clock)
    first, _ = running.join(2)
    call = Wait(STREAM, 3, "allreduce", "0-1", 0.5)
    running.judge({1: {"left": True, "others": [call]}, 0: {"main": call}})
    running.judge({1: {"left": True, "counts": {STREAM: 3}}})
    assert said() == ""
    first.report(main=Wait(STREAM, 4, "bcast", "0-1", 0.5))
    running.wait_until_heard(0, clock.now)
    clock.now += PERIOD
    wait_for_stderr("bcast (call 4 on", said)


def test_ranks_hear_ten_times_within_the_limit_that_it_is_there(start: Start) -> None:
    running = start(1, limit=100 * PERIOD, clock=Clock())
    running.look_again()  # the first tick, which nobody hears
    (rank,) = running.join(1)
    for _ in range(25):
        running.look_again()
    rank.report(left=True)
    rank.hear(Go)
    assert [type(message) for message in rank.all].count(Tick) == 2


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open as many files as the system allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("size", [64, pytest.param(512, marks=pytest.mark.nightly)])
def test_one_of_many_ranks_is_named_in_a_short_message(
    size: int, start: Start, said: Said
) -> None:
    ranks = f"0-{size - 1}"
    stream = f"communicator 1 of ranks {ranks}"
    running = start(size, clock=Clock())
    call = {"main": Wait(stream, 3, "allreduce", ranks, 0.5), "counts": {stream: 3}}
    running.join(size)
    running.judge({rank: call for rank in range(size) if rank != 30})
    assert said() == ""
    running.judge({30: {"left": True, "counts": {stream: 2}}})
    message = said()
    assert message.startswith(
        "chainermn: rank 30 on here has ended its script, or called sys.exit, while others wait "
        f"for it:\n  allreduce (call 3 on communicator 1 of ranks {ranks})\n"
        "    HAS NOT arrived: rank 30 on here, which has ended its script\n"
        "    has arrived: rank 0 on here, which has been in allreduce"
    )
    assert f"\n  and {size - 16} more\n" in message
    assert len(message.splitlines()) < 25


def test_silent_rank_is_not_the_one_to_end_the_job(start: Start, said: Said) -> None:
    clock = Clock()
    running = start(limit=2.0, clock=clock)
    _, second = running.join(2)
    for now in (1.9, 3.0):
        clock.now = now
        second.report()
        running.wait_until_heard(1, now)
    wait_for_stderr("rank 0 on here (process 100) has been silent for 3 s", said)
    clock.now = 3.5
    assert second.hear(End).first == 1


# ---- strangers, and ranks that are not what they seem ----


def test_strangers_neither_end_the_job_nor_are_missed(start: Start) -> None:
    running = start(3)
    first, _ = running.join(2)
    with socket.create_connection(running.endpoint.addresses[0]) as stranger:
        stranger.sendall(encode(Failing("a stranger's")))
        assert stranger.recv(1) == b""
    with socket.create_connection(running.endpoint.addresses[0]):
        assert first.hear(Tick) == first.hear(Tick)
    assert first.hear(Tick) == first.hear(Tick)


def test_nobody_can_connect_once_all_ranks_have_joined(start: Start) -> None:
    running = start(2)
    running.join(2)
    wait_until_nobody_can_connect(running)


def wait_until_nobody_can_connect(running: Running, address: Address | None = None) -> None:
    is_open = True
    while is_open:
        with socket.socket() as stranger:
            refused = stranger.connect_ex(address or running.endpoint.addresses[0])
            is_open = refused != errno.ECONNREFUSED


def test_ranks_that_cannot_connect_are_not_waited_for(start: Start) -> None:
    running = start(4)
    first, _ = running.join(2)
    with socket.create_connection(running.endpoint.addresses[0]) as stranger:
        first.channel.send(Absent("2-3"))
        assert stranger.recv(1) == b""
    wait_until_nobody_can_connect(running)


def test_it_listens_again_for_ranks_that_come_later(start: Start) -> None:
    running = start(2, size=4)
    first, _ = running.join(2)
    wait_until_nobody_can_connect(running)
    first.channel.send(Expect("2-3"))
    where = first.hear(Listening).addresses
    endpoint = running.endpoint._replace(addresses=where)
    third = Rank(endpoint, 2)
    first.channel.send(Expect("1-2"))  # both have joined already
    assert first.hear(Listening).addresses == where
    third.report(left=True)
    fourth = Rank(endpoint, 3)
    wait_until_nobody_can_connect(running, where[0])
    for late in (third, fourth):
        late.channel.send(Stop())
        late.channel.close()


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n",
        b"[" * 100_000 + b"\n",
        encode(Tick()),
        encode(Absent("0-2")),
        encode(Absent("a")),
        encode(Report(Wait(STREAM, 3, "allreduce", "0-99999999999", 0.5), [], {}, "", False)),
        encode(Report(None, [Wait(STREAM, 3, "allreduce", "0-2", 0.5)], {}, "", False)),
        encode(Report(Wait(STREAM, 3, "allreduce", "", 0.5), [], {}, "", False)),
        encode(Report(None, [], {STREAM: -1}, "", False)),
    ],
    ids=lambda line: repr(line[:60]),
)
def test_rank_that_does_not_speak_as_ranks_do_ends_the_job(
    line: bytes, start: Start, said: Said
) -> None:
    clock = Clock()
    first, second = start(clock=clock).join(2)
    second.channel.send_encoded(line)
    wait_for_stderr("sent something that a rank never sends (", said)
    clock.now = 1.0
    assert first.hear(End).first == 0


def test_nobody_comes_and_the_rank_that_started_it_ends(start: Start) -> None:
    with subprocess.Popen(["sleep", "600"]) as starter:
        running = start(starter=starter.pid)
        starter.kill()
    running.wait()


@pytest.mark.parametrize(("name", "is_killed"), [("hydra_pmi_proxy", True), ("prterun", False)])
def test_all_are_gone_at_once(
    name: str,
    is_killed: bool,
    start: Start,
    launchers: list[Process],
    launcher: Launcher,
    tmp_path: Path,
) -> None:
    program = tmp_path / name
    program.write_text("#!/bin/sh\nread -r line\n")
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as process:
        launchers.append(named(name, process.pid))
        running = start(clock=Clock())
        for rank in running.join(2):
            rank.channel.close()
        running.wait()
        if not is_killed:  # Open MPI's launcher needs no help
            process.communicate(b"\n")
        assert process.wait(TIMEOUT) == (-signal.SIGKILL if is_killed else 0)
    assert launcher() == "here"
