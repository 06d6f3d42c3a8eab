"""What a rank reports, and what makes it end the job. This test is the monitor."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from chainermn.failures import main_thread, watch
from chainermn.failures.activity import waiting
from chainermn.failures.channel import Channel, Message, listen
from chainermn.failures.invitation import Invitation
from chainermn.failures.main_thread import Interrupts
from chainermn.failures.watch import Watch

HOST = socket.gethostname()
TIMEOUT = 60.0


class Ended(BaseException):
    """In the place of the death of this process."""


class Peer:
    """The monitor's end of the connection of rank 3."""

    def __init__(self, limit: float) -> None:
        self._listener = listen()
        self._messages: list[Message] = []
        port = self._listener.getsockname()[1]
        self.invitation = Invitation("there", ["127.0.0.1"], port, "secret", limit, period=0.05)
        thread = threading.Thread(target=self._welcome, daemon=True)
        thread.start()
        channel = self.invitation.accept(3)
        self.watch = Watch(self.invitation, 3, channel) if channel else None
        if self.watch:
            self.watch.start()
        thread.join(TIMEOUT)

    def _welcome(self) -> None:
        connection, _ = self._listener.accept()
        self.channel = Channel(connection)
        assert self.hear() == {"token": "secret"}
        self.channel.send({"kind": "welcome"})
        self.joined = self.hear()
        self.channel.send({"kind": "welcome"})

    def hear(self) -> Message:
        """Wait for the next message."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            while not self._messages:
                assert selector.select(TIMEOUT)
                self._messages = self.channel.receive()
        return self._messages.pop(0)

    def report_of(self, expected: Callable[[Message], bool]) -> Message:
        """Wait for a report of which something is true."""
        deadline = time.monotonic() + TIMEOUT
        while not expected(report := self.hear()):
            assert time.monotonic() < deadline, report
        return report

    def close(self) -> None:
        self._listener.close()
        self.channel.close()
        if self.watch is not None:
            self.watch.join(TIMEOUT)
            assert not self.watch.is_alive()
            self.watch.close_in_child()
            self.watch = None


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Let nothing end this process; return the messages, and after how long they would come."""
    calls: list[tuple[str, float]] = []

    def end_job(
        message: str, *, after: float = 0.0, announce: Callable[[], bool] = lambda: True
    ) -> None:
        calls.append((message if announce() else "", after))
        raise Ended

    def run(self: Watch) -> None:
        with contextlib.suppress(Ended):
            really_run(self)

    really_run = Watch.run
    monkeypatch.setattr(Watch, "run", run)
    monkeypatch.setattr(watch, "end_job", end_job)
    return calls


@pytest.fixture
def meet(ends: list[tuple[str, float]]) -> Iterator[Callable[..., Peer]]:
    met: list[Peer] = []

    def start(limit: float = 0.0) -> Peer:
        met.append(Peer(limit))
        return met[-1]

    yield start
    for peer in met:
        peer.close()
    signal.set_wakeup_fd(-1)


Meet = Callable[..., Peer]


def test_what_a_rank_reports(meet: Meet, ends: list[tuple[str, float]]) -> None:
    peer = meet()
    assert peer.joined == {"token": "secret", "rank": 3, "host": HOST, "pid": os.getpid()}
    assert peer.report_of(lambda report: report["main"] is None)["left"] is False
    call = ["communicator 9 of ranks 0-3", "allreduce", "0-3"]
    with waiting(*call):
        report = peer.report_of(lambda it: it["main"] and "selectors.py" in it["place"])
        assert [report["main"][i] for i in (0, 2, 3)] == call
        assert report["place"].startswith(f"{__file__}:")
        assert ", inside of it " in report["place"]
        assert report["others"] == []
    peer.report_of(lambda report: report["main"] is None)
    peer.channel.send({"kind": "go"})
    peer.close()
    assert ends == []


def test_calls_are_counted_once(meet: Meet) -> None:
    peer = meet()
    stream = "communicator 8 of ranks 0-3"
    for number in (1, 2):
        with waiting(stream, "bcast", "0-3"):
            assert peer.report_of(lambda report: bool(report["main"]))["main"][1] == number
        counted = peer.report_of(lambda report: report["main"] is None)["counts"]
        assert stream not in counted  # it has been told with the call
    peer.channel.send({"kind": "go"})


def test_rank_leaves_when_all_have(
    meet: Meet, ends: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[None] = []
    mpi = SimpleNamespace(
        Is_finalized=lambda: len(probes) > 2,
        COMM_WORLD=SimpleNamespace(Iprobe=lambda: probes.append(None)),
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    peer = meet()
    assert peer.watch is not None
    leaving = threading.Thread(target=peer.watch.leave, daemon=True)
    leaving.start()
    peer.report_of(lambda report: report["left"])
    while len(probes) < 3:
        peer.hear()
    assert leaving.is_alive()
    peer.channel.send({"kind": "go"})
    leaving.join(TIMEOUT)
    assert not leaving.is_alive()
    assert ends == []


def test_interrupt_while_a_rank_waits_at_its_end(
    meet: Meet, ends: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "_SECONDS_FOR_AN_ANSWER", 0.0)
    mpi = SimpleNamespace(Is_finalized=lambda: False, COMM_WORLD=SimpleNamespace(Iprobe=interrupt))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    peer = meet()
    assert peer.watch is not None
    with pytest.raises(Ended):
        peer.watch.leave()
    ((message, _),) = ends
    assert f"rank 3 on {HOST} was interrupted at its end" in message
    told = peer.report_of(lambda message: message["kind"] == "failing")
    # A rank that was interrupted elsewhere gives the same reason.
    assert peer.watch.say_failing(watch.INTERRUPTED)
    assert peer.report_of(lambda it: it["kind"] == "failing") == told
    peer.channel.send({"kind": "go"})


@pytest.mark.parametrize(("first", "seconds"), [(3, 0.0), (1, 2.0)])
def test_rank_is_told_to_end(
    first: int, seconds: float, meet: Meet, ends: list[tuple[str, float]]
) -> None:
    peer = meet()
    peer.channel.send({"kind": "tick"})
    peer.channel.send({"kind": "end", "first": first, "reason": ""})
    peer.close()
    assert ends == [("", seconds)]  # whoever knows the reason says it


def test_monitor_is_gone(meet: Meet, ends: list[tuple[str, float]]) -> None:
    meet().close()
    ((message, _),) = ends
    assert "the process that watches over the job on there has been killed" in message
    assert f"Reported by rank 3 on {HOST}" in message


def test_rank_is_ended_by_somebody_who_knows_why(
    meet: Meet, ends: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = meet()
    monkeypatch.setattr(watch, "_watch", peer.watch)
    watch.stop_watching()
    peer.report_of(lambda message: message["kind"] == "stop")
    assert peer.watch is not None
    peer.watch.join(TIMEOUT)
    peer.close()
    assert ends == []


def test_monitor_is_silent(meet: Meet, ends: list[tuple[str, float]]) -> None:
    with waiting("communicator 7 of ranks 0-3", "gather", "0-3"):
        peer = meet(limit=0.5)
        assert peer.watch is not None
        peer.watch.join(TIMEOUT)
    ((message, _),) = ends
    assert "nothing has come from there for " in message
    assert "in gather (call 1 on communicator 7 of ranks 0-3), at " in message


@pytest.mark.parametrize(
    ("first", "first_reason", "is_to_say_it"),
    [(3, "the same", True), (1, "the same", False), (1, "another", True), (None, "another", True)],
)
def test_rank_that_fails_says_why_unless_another_one_has(
    first: int | None, first_reason: str, is_to_say_it: bool, meet: Meet, ends: Any
) -> None:
    peer = meet()
    assert peer.watch is not None
    says: list[bool] = []
    watched = peer.watch
    thread = threading.Thread(target=lambda: says.append(watched.say_failing("mine")))
    thread.start()
    told = peer.report_of(lambda message: message["kind"] == "failing")
    reason = told["reason"] if first_reason == "the same" else "another"
    peer.channel.send({"kind": "end", "first": first, "reason": reason})
    thread.join(TIMEOUT)
    assert says == [is_to_say_it]


def test_rank_that_fails_and_hears_nothing_says_why(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SECONDS_FOR_AN_ANSWER", 0.0)
    peer = meet()
    assert peer.watch is not None
    assert peer.watch.say_failing("mine")
    peer.channel.send({"kind": "go"})


def test_monitor_that_cannot_be_reached() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]
    invitation = Invitation("there", ["127.0.0.1"], port, "secret", 0.0, 0.05)
    assert invitation.accept(3) is None


# ---- interrupts ----


def test_interrupt_that_the_main_thread_ignores(
    meet: Meet, ends: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = main_thread.main_stack()
    monkeypatch.setattr(main_thread, "_PATIENCE", 0.2)
    monkeypatch.setattr(main_thread, "main_stack", lambda: stuck)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        peer = meet()
        assert peer.watch is not None
        # As the signal's handler in C does, while the main thread is in other code in C.
        os.write(peer.watch._wake_writer, bytes([signal.SIGINT]))
        peer.watch.join(TIMEOUT)
    finally:
        signal.signal(signal.SIGINT, before)
    ((message, _),) = ends
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
    ("number", "handler", "is_noted"),
    [
        (signal.SIGINT, signal.default_int_handler, True),
        (signal.SIGINT, signal.SIG_IGN, False),
        (signal.SIGTERM, signal.default_int_handler, False),
    ],
)
def test_interrupts_that_matter(
    number: int,
    handler: Any,
    is_noted: bool,
    pipe: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main_thread, "_PATIENCE", 0.0)
    monkeypatch.setattr(main_thread, "main_stack", lambda: ["where it is stuck"])
    before = signal.signal(signal.SIGINT, handler)
    try:
        noticed = Interrupts(pipe[1])
        noticed.note(bytes([number]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert noticed.are_ignored() == is_noted
    assert not noticed.are_ignored()  # it is looked into once


def test_main_thread_that_goes_on(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = iter([["here"], ["there"]])
    monkeypatch.setattr(main_thread, "_PATIENCE", 0.0)
    monkeypatch.setattr(main_thread, "main_stack", lambda: next(stacks))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        noticed = Interrupts(pipe[1])
        noticed.note(bytes([signal.SIGINT]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not noticed.are_ignored()


def test_who_wants_to_hear_of_signals_first_keeps_that(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    Interrupts(reader)
    assert signal.set_wakeup_fd(-1) == writer
    thread = threading.Thread(target=Interrupts, args=[writer])  # where it is not allowed
    thread.start()
    thread.join()
    assert signal.set_wakeup_fd(-1) == -1
