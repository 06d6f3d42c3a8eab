"""Process beside rank 0 that hears all ranks, and decides when the job has to end.

A process, because rank 0 may itself be stopped or stuck in C code. MPICH 5.0.2 and Open MPI 5.0.11
both wait forever for a rank that stops, or that calls ``sys.exit`` while others wait for it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import time
from typing import Any, NamedTuple

from chainermn.failures.channel import Channel, Message, listen, own_addresses
from chainermn.failures.clock import AwakeClock
from chainermn.failures.ending import SECONDS_FOR_OUTPUT, print_at_once
from chainermn.failures.helper import start_helper
from chainermn.failures.hold import SECONDS_HELD
from chainermn.failures.judgement import Judge, RankState
from chainermn.failures.processes import Process, find, launchers_of
from chainermn.failures.wait import Wait

# Once a rank is gone, mpiexec may end the job by itself, with the exit code that fits.
_SECONDS_FOR_MPIEXEC = 1.0
# For ranks to end.
_SECONDS_FOR_RANKS = 15.0


class Invitation(NamedTuple):
    """How a rank reaches the monitor.

    Attributes
    ----------
    host : str
    addresses : list of str
    port : int
    token : str
        Secret of the job: messages from anybody who does not know it are ignored.
    limit : float
        Seconds of silence or waiting that count as a failure; 0 for no limit.
    period : float
        Seconds between two reports.
    """

    host: str
    addresses: list[str]
    port: int
    token: str
    limit: float
    period: float


def start_monitor(size: int, limit: float) -> tuple[Invitation, subprocess.Popen[bytes]]:
    """Start a monitor for ``size`` ranks; return also its process, which ends with the last rank.

    Raises
    ------
    OSError
        If no socket or process can be had.
    """
    with listen() as listener:
        invitation = Invitation(
            socket.gethostname(),
            own_addresses(),
            listener.getsockname()[1],
            os.urandom(16).hex(),
            limit,
            # One process handles this many reports per second with ease.
            max(min(1.0, limit / 10) if limit else 1.0, size / 500),
        )
        arguments = {"listener": listener.fileno(), "invitation": invitation, "pid": os.getpid()}
        return invitation, start_helper("monitor", arguments, [listener.fileno()])


def main(listener: int, invitation: list[Any], pid: int) -> None:
    """Run a monitor, in the process that `start_monitor` starts."""
    Monitor(socket.socket(fileno=listener), Invitation(*invitation), find(pid)).run()


class Monitor:
    """Receives the reports of all ranks.

    Parameters
    ----------
    listener : socket.socket
    invitation : Invitation
    starter : Process or None
        The rank that has started this process; None if it has already ended.
    """

    def __init__(
        self, listener: socket.socket, invitation: Invitation, starter: Process | None
    ) -> None:
        self._listener = listener
        self._invitation = invitation
        self._starter = starter
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._clock = AwakeClock(2 * invitation.period)
        self._members: dict[Channel, RankState] = {}
        self._heard_at: dict[int, float] = {}
        self._warned_at: dict[str, float] = {}
        self._launchers = launchers_of(os.getpid())
        # The rank that ends the job for all, and when the others are told to end too.
        self._first: int | None = None
        self._reason = ""
        self._tell_at = float("inf")
        self._is_ending = self._is_over = False
        self._give_up_at = float("inf")

    def run(self) -> None:
        """Listen and judge until all ranks are gone."""
        next_tick = 0.0
        while not self._is_done():
            for key, _ in self._selector.select(self._invitation.period / 4):
                if isinstance(key.fileobj, Channel):
                    self._hear(key.fileobj, key.data)
                else:
                    self._accept()
            now = self._clock.read()
            if now >= self._tell_at:
                self._tell_to_end()
            elif now >= next_tick and not self._is_ending:
                next_tick = now + self._invitation.period
                self._broadcast({"kind": "tick"})
                self._judge()
        if self._is_ending and self._tell_at < float("inf"):  # all ended without being told to
            self._end_mpiexec()

    def _is_done(self) -> bool:
        if not self._heard_at:
            return not (self._starter and self._starter.is_alive())
        return not self._members or (self._is_ending and self._clock.read() > self._give_up_at)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._selector.register(Channel(connection), selectors.EVENT_READ, "stranger")

    def _hear(self, channel: Channel, who: str) -> None:
        try:
            for message in channel.receive():
                if who == "stranger":
                    who = self._check(channel, message)
                else:
                    self._take(channel, message)
        except ConnectionError:
            self._selector.unregister(channel)
            channel.close()
            lost = self._members.pop(channel, None)
            if lost and not self._is_over:
                self._end(
                    f"{lost.name} (process {lost.pid}) is the first to be gone, without a word: "
                    "it was killed, it has crashed, or it has called os._exit.",
                    _SECONDS_FOR_MPIEXEC,
                )

    def _check(self, channel: Channel, message: Message) -> str:
        if message.get("token") != self._invitation.token:
            raise ConnectionError("not of this job")
        self._selector.modify(channel, selectors.EVENT_READ, "guest")
        channel.send({"kind": "welcome"})
        return "guest"

    def _take(self, channel: Channel, message: Message) -> None:
        kind = message["kind"]
        if kind == "join":
            state = RankState(message["rank"], message["host"], message["pid"])
            self._members[channel] = state
            channel.send({"kind": "joined"})
        else:
            state = self._members[channel]
        self._heard_at[state.rank] = self._clock.read()
        if kind == "report":
            self._note(state, message)
        if kind == "failing" and not self._is_ending:  # the rank itself prints why
            self._is_ending, self._first = True, state.rank
            self._reason = message["reason"]
            self._tell_at = self._clock.read()
        if not self._is_over and all(m.left_at is not None for m in self._members.values()):
            self._is_over = True
            self._broadcast({"kind": "go"})

    def _note(self, state: RankState, report: Message) -> None:
        now = self._clock.read()

        def wait(
            stream: str, number: int, operation: str, members: str, seconds: float, caller: str
        ) -> Wait:
            return Wait(stream, number, operation, members, now - seconds, caller)

        state.main_wait = wait(*report["main"]) if report["main"] else None
        state.other_waits = [wait(*other) for other in report["others"]]
        state.counts.update(report["counts"])
        state.place = report["place"]
        if report["left"] and state.left_at is None:
            state.left_at = now

    def _judge(self) -> None:
        now, limit = self._clock.read(), self._invitation.limit
        for state in self._members.values():
            state.silence = now - self._heard_at[state.rank]
        for verdict in Judge(self._members.values(), now, limit).verdicts():
            if verdict.is_fatal:
                self._end(verdict.text)
                break
            if now - self._warned_at.get(verdict.subject, -limit) >= limit:
                self._warned_at[verdict.subject] = now
                print_at_once(f"chainermn: {verdict.text}")

    def _end(self, text: str, patience: float = SECONDS_FOR_OUTPUT) -> None:
        """Print why the job has to end, unless it is already ending, and end it soon after."""
        if not self._is_ending:
            print_at_once(f"chainermn: {text}\nThe whole job is being ended.")
            self._is_ending = True
            self._tell_at = self._clock.read() + patience

    def _tell_to_end(self) -> None:
        now = self._clock.read()
        if self._first is None:
            lately = now - 3 * self._invitation.period - _SECONDS_FOR_MPIEXEC
            able = [s.rank for s in self._members.values() if self._heard_at[s.rank] > lately]
            self._first = min(able, default=None)
        self._broadcast({"kind": "end", "first": self._first, "reason": self._reason})
        self._tell_at = float("inf")
        self._give_up_at = now + _SECONDS_FOR_RANKS

    def _end_mpiexec(self) -> None:
        """Kill MPICH's mpiexec, which exits with 0 if a rank has called ``os._exit(0)``.

        It is still there, because this process keeps the standard error of a rank open.
        """
        if not any(launcher.name.startswith("hydra_") for launcher in self._launchers):
            return
        time.sleep(SECONDS_HELD + SECONDS_FOR_OUTPUT)
        for launcher in reversed(self._launchers):
            launcher.kill()

    def _broadcast(self, message: Message) -> None:
        for channel in self._members:
            channel.send(message)
