"""What a rank reports, and what makes it end the job. The tests act as the monitor."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from chainermn.connections.joining import LOOPBACK, Endpoint, Listener, listen
from chainermn.connections.messages import Address, Message
from chainermn.failures import watch
from chainermn.failures.activity import MarkedCall
from chainermn.failures.messages import (
    OF_RANK,
    End,
    Expect,
    Failing,
    Go,
    Listening,
    Report,
    Stop,
    Tick,
)
from chainermn.failures.settings import PURPOSE, WatchSettings
from chainermn.failures.watch import Watch
from chainermn.process import main_thread
from chainermn.process.main_thread import Interrupts

HOST = socket.gethostname()
TIMEOUT = 60.0
M = TypeVar("M")
# Messages of `end_job`, each with its delay in seconds and the lost host.
Ends = list[tuple[str, float, str]]


class Ended(BaseException):
    """A stand-in for the death of this process."""


class Peer:
    """The monitor's end of the connection of rank 3."""

    def __init__(self, limit: float) -> None:
        sockets = listen([LOOPBACK])
        endpoint = Endpoint.of(sockets)
        self._listener = Listener(sockets, endpoint.key, range(4), [PURPOSE])
        self._messages: list[Message] = []
        self.settings = WatchSettings("there", endpoint, "0-3", 4, limit, period=0.05)
        thread = threading.Thread(target=self._welcome, daemon=True)
        thread.start()
        channel = self.settings.connect(3)
        assert channel is not None
        self.watch = Watch(self.settings, 3, channel)
        self.watch.start()
        thread.join(TIMEOUT)

    def _welcome(self) -> None:
        while not (joined := self._listener.serve(0.0)):
            time.sleep(0.001)
        ((self.channel, self.joined),) = joined

    def hear(self) -> Message:
        """Wait for the next message."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            while not self._messages:
                assert selector.select(TIMEOUT)
                self._messages = self.channel.receive(OF_RANK)
        return self._messages.pop(0)

    def hear_of(self, kind: type[M], expected: Callable[[M], object] = bool) -> M:
        """Wait for a message of this kind that meets a condition."""
        deadline = time.monotonic() + TIMEOUT
        while not isinstance(message := self.hear(), kind) or not expected(message):
            assert time.monotonic() < deadline, message
        return message

    def report_of(self, expected: Callable[[Report], object]) -> Report:
        """Wait for a report that meets a condition."""
        return self.hear_of(Report, expected)

    def close(self) -> None:
        self._listener.close()
        self.channel.close()
        self.watch.join(TIMEOUT)
        assert not self.watch.is_alive()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Make `end_job` only note its calls; return its arguments."""
    calls: Ends = []

    def end_job(
        message: str,
        *,
        after: float = 0.0,
        announce: Callable[[], bool] = lambda: True,
        lost: str = "",
    ) -> None:
        calls.append((message if announce() else "", after, lost))
        raise Ended

    def run(self: Watch) -> None:
        with contextlib.suppress(Ended):
            really_run(self)

    really_run = Watch.run
    monkeypatch.setattr(Watch, "run", run)
    monkeypatch.setattr(watch, "end_job", end_job)
    return calls


@pytest.fixture
def meet(ends: Ends) -> Iterator[Callable[..., Peer]]:
    met: list[Peer] = []

    def start(limit: float = 0.0) -> Peer:
        met.append(Peer(limit))
        return met[-1]

    yield start
    for peer in met:
        peer.close()
        peer.watch.close_in_child()
    signal.set_wakeup_fd(-1)


Meet = Callable[..., Peer]


def test_what_a_rank_reports(meet: Meet, ends: Ends) -> None:
    peer = meet()
    assert peer.joined == (3, PURPOSE, HOST, os.getpid())
    assert peer.report_of(lambda report: report.main is None).left is False
    call = ["communicator 9 of ranks 0-3", "allreduce", "0-3"]
    with MarkedCall(*call):
        report = peer.report_of(lambda it: it.main and "selectors.py" in it.place)
        assert [report.main[i] for i in (0, 2, 3)] == call
        assert report.place.startswith(f"{__file__}:")
        assert ", now in " in report.place
        assert report.others == []
    peer.report_of(lambda report: report.main is None)
    peer.channel.send(Go())
    peer.close()
    assert ends == []


def test_calls_are_counted_once(meet: Meet) -> None:
    peer = meet()
    stream = "communicator 8 of ranks 0-3"
    for number in (1, 2):
        with MarkedCall(stream, "bcast", "0-3"):
            assert peer.report_of(lambda report: report.main).main.number == number
        counted = peer.report_of(lambda report: report.main is None).counts
        assert stream not in counted  # already reported with the call
    peer.channel.send(Go())


def test_rank_leaves_when_all_have(
    meet: Meet, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[None] = []
    mpi = SimpleNamespace(
        Is_finalized=lambda: len(probes) > 2,
        COMM_WORLD=SimpleNamespace(Iprobe=lambda: probes.append(None)),
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    peer = meet()
    leaving = threading.Thread(target=peer.watch.leave, daemon=True)
    leaving.start()
    peer.report_of(lambda report: report.left)
    while len(probes) < 3:
        peer.hear()
    assert leaving.is_alive()
    peer.channel.send(Go())
    leaving.join(TIMEOUT)
    assert not leaving.is_alive()
    assert ends == []


def test_interrupt_while_a_rank_waits_at_its_end(
    meet: Meet, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    mpi = SimpleNamespace(Is_finalized=lambda: False, COMM_WORLD=SimpleNamespace(Iprobe=interrupt))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    peer = meet()

    def answer() -> Failing:
        told = peer.hear_of(Failing)
        peer.channel.send(End(3, told.reason))
        return told

    with ThreadPoolExecutor(1) as threads, pytest.raises(Ended):
        answered = threads.submit(answer)
        peer.watch.leave()
    (message,) = (message for message, _, _ in ends if message)
    assert f"rank 3 on {HOST} was interrupted at its end" in message
    # A rank that was interrupted elsewhere gives the same reason.
    assert peer.watch.say_failing(watch.INTERRUPTED)
    assert peer.hear_of(Failing) == answered.result(TIMEOUT)


@pytest.mark.parametrize(("first", "seconds"), [(3, 0.0), (1, watch.SECONDS_FOR_THE_FIRST)])
def test_rank_is_told_to_end(first: int, seconds: float, meet: Meet, ends: Ends) -> None:
    peer = meet()
    peer.channel.send(Tick())
    peer.channel.send(End(first, ""))
    peer.close()
    assert ends == [("", seconds, "")]  # whoever knows the reason says it


def test_monitor_is_gone(meet: Meet, ends: Ends) -> None:
    meet().close()
    ((message, _, lost),) = ends
    assert "the process that watches over the job on there has been killed" in message
    assert lost == "there"
    assert f"Reported by rank 3 on {HOST}" in message


def test_rank_is_ended_by_somebody_who_knows_why(meet: Meet, ends: Ends) -> None:
    peer = meet()
    peer.watch.stop()
    peer.hear_of(Stop, lambda stop: True)
    peer.watch.join(TIMEOUT)
    peer.close()
    assert ends == []


def test_monitor_is_silent(meet: Meet, ends: Ends) -> None:
    with MarkedCall("communicator 7 of ranks 0-3", "gather", "0-3"):
        peer = meet(limit=0.5)
        peer.watch.join(TIMEOUT)
    ((message, _, lost),) = ends
    assert "nothing has come from there for " in message
    assert lost == "there"
    assert "in gather (call 1 on communicator 7 of ranks 0-3), at " in message


@pytest.mark.parametrize(
    ("first", "first_reason", "is_to_say_it"),
    [(3, "the same", True), (1, "the same", False), (1, "another", True), (None, "another", True)],
)
def test_rank_that_fails_says_why_unless_another_one_has(
    first: int | None, first_reason: str, is_to_say_it: bool, meet: Meet, ends: Any
) -> None:
    peer = meet()
    says: list[bool] = []
    thread = threading.Thread(target=lambda: says.append(peer.watch.say_failing("mine")))
    thread.start()
    told = peer.hear_of(Failing)
    reason = told.reason if first_reason == "the same" else "another"
    peer.channel.send(End(first, reason))
    thread.join(TIMEOUT)
    assert says == [is_to_say_it]


def test_rank_that_fails_and_hears_nothing_says_why(meet: Meet) -> None:
    peer = meet()
    assert peer.watch.say_failing("mine", patience=0.0)
    peer.channel.send(Go())


def test_monitor_that_cannot_be_reached() -> None:
    (listening,) = listen([LOOPBACK])
    with listening:
        settings = WatchSettings("there", Endpoint.of([listening]), "0-3", 4, 0.0, 0.05)
    assert settings.connect(3) is None


def test_where_ranks_that_come_later_are_to_connect(meet: Meet) -> None:
    peer = meet()
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(peer.watch.endpoint_for, [4, 5])
        assert peer.hear_of(Expect) == Expect("4-5")
        peer.channel.send(Listening([Address("127.0.0.1", 7)]))
        endpoint = found.result(TIMEOUT)
    assert endpoint == ([("127.0.0.1", 7)], peer.settings.endpoint.key)
    peer.channel.send(Go())


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", b'["Stop"]\n', b'["End", "1", "", ""]\n'])
def test_monitor_that_does_not_speak_as_monitors_do(line: bytes, meet: Meet, ends: Ends) -> None:
    peer = meet()
    peer.channel.send_encoded(line)
    peer.watch.join(TIMEOUT)
    ((message, *_),) = ends
    assert "watches over the job on there has sent something that it never sends (" in message


# ---- interrupts ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Return the clock of `Interrupts`, which only moves when a test sets ``now``.

    In the end, this restores the handler of interrupts.
    """
    standing = SimpleNamespace(now=0.0, monotonic=lambda: standing.now)
    monkeypatch.setattr(main_thread, "time", standing)
    before = signal.getsignal(signal.SIGINT)
    yield standing
    signal.signal(signal.SIGINT, before)


def test_interrupt_that_the_main_thread_ignores(
    meet: Meet, ends: Ends, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = main_thread.main_stack()
    monkeypatch.setattr(main_thread, "main_stack", lambda: stuck)
    clock.monotonic = itertools.count(0, 10).__next__
    signal.signal(signal.SIGINT, signal.default_int_handler)
    peer = meet()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    peer.watch.join(TIMEOUT)
    ((message, _, lost),) = ends
    assert lost == ""
    assert f"rank 3 on {HOST} was interrupted while it was at {__file__}" in message


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    signal.set_wakeup_fd(-1)
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    ("number", "handler", "stacks", "is_ignored"),
    [
        (signal.SIGINT, signal.default_int_handler, ["stuck", "stuck"], True),
        (signal.SIGINT, signal.default_int_handler, ["here", "there"], False),
        (signal.SIGINT, signal.SIG_IGN, [], False),
        (signal.SIGTERM, signal.default_int_handler, [], False),
    ],
)
def test_interrupts_that_are_ignored(
    number: int,
    handler: Any,
    stacks: list[str],
    is_ignored: bool,
    pipe: tuple[int, int],
    clock: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main_thread, "main_stack", iter(stacks).__next__)
    signal.signal(signal.SIGINT, handler)
    noticed = Interrupts(pipe[1])
    noticed.note(bytes([number]))
    clock.now = 2.9
    assert not noticed.are_ignored()
    clock.now = 3.1
    assert noticed.are_ignored() == is_ignored
    assert not noticed.are_ignored()  # an interrupt is examined only once


def test_who_wants_to_hear_of_signals_first_keeps_that(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    Interrupts(reader)
    assert signal.set_wakeup_fd(-1) == writer
    thread = threading.Thread(target=Interrupts, args=[writer])  # only the main thread may set it
    thread.start()
    thread.join()
    assert signal.set_wakeup_fd(-1) == -1
