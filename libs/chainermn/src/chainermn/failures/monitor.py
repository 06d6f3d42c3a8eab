"""The monitor: a process beside rank 0 that hears all ranks and decides when the job must end.

It is a separate process because rank 0 may itself be stopped or stuck in C code. MPICH 5.0.2 and
Open MPI 5.0.11 both wait forever for a rank that stops, or that calls ``sys.exit`` while others
wait for it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from chainermn.connections.channel import Channel, MalformedError
from chainermn.connections.joining import Listener
from chainermn.connections.messages import Member, Message, encode
from chainermn.failures.ending import SECONDS_FOR_OUTPUT, print_at_once, use_terminal
from chainermn.failures.group_signals import GroupSignals
from chainermn.failures.guard import SECONDS_HELD
from chainermn.failures.judgment import Judge, RankState
from chainermn.failures.launcher import MONITOR, connect
from chainermn.failures.messages import (
    OF_RANK,
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
from chainermn.failures.settings import PURPOSE, WatchSettings
from chainermn.failures.wait import from_ranges, last_of
from chainermn.process.patience import AwakeClock
from chainermn.process.processes import (
    Process,
    errors_of,
    find,
    launchers_of,
    shared_memory_of,
    unlink_all,
)

# Once a rank is gone, mpiexec may end the job itself, with a fitting exit code.
_SECONDS_FOR_MPIEXEC = 1.0
# Fraction of a period in which messages collect, since waking up costs more than reading one.
_PAUSE = 0.05
# Seconds that ranks get to end.
_SECONDS_FOR_RANKS = 15.0


def main(sockets: list[int], settings: list[Any], pid: int) -> None:
    """Run a monitor, in the process that `start_monitor` starts."""
    signals = GroupSignals.of_this_group()
    # Each rank needs a socket, and until it has joined one for each address that it tries.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listening = [socket.socket(fileno=each) for each in sockets]
    rank, memory = find(pid), shared_memory_of(pid)
    Monitor(listening, WatchSettings.from_json(settings), rank, signals).run()
    if rank is None or not rank.is_alive():  # otherwise it removes this itself, as it leaves MPI
        unlink_all(memory)


class Monitor:
    """Receives the reports of all ranks, the first of which has started this process.

    It stops listening when all expected ranks have joined, which are usually all of the job.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        settings: WatchSettings,
        starter: Process | None,
        signals: GroupSignals,
    ) -> None:
        key = settings.endpoint.key
        self._listener = Listener(sockets, key, from_ranges(settings.ranks), [PURPOSE])
        self._settings = settings
        use_terminal(settings.has_terminal)
        # None as soon as a rank has joined.
        self._starter = starter
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._signals = signals
        self._selector.register(signals, selectors.EVENT_READ)
        # Reports only closed connections; exists only on Linux.
        self._ends = select.epoll() if sys.platform == "linux" else None
        self._clock = AwakeClock(2 * settings.period)
        self._members: dict[Channel, RankState] = {}
        self._warned_at: dict[str, float] = {}
        self._launchers = launchers_of(os.getpid())
        self._errors = errors_of(self._launchers[-1]) if self._launchers else None
        # Whether ranks may disappear without that being a failure.
        self._may_leave = False
        # Whether something outside of the job has ended them.
        self._is_ended_from_outside = False
        # When the job ends, which rank ends it and why, and whether the ranks have been told.
        self._end_at = float("inf")
        self._first: int | None = None
        self._reason = ""
        self._lost = ""
        self._is_told = False
        self._launcher: Channel | None = None

    def run(self) -> None:
        """Receive reports and judge them until all ranks are gone."""
        next_look = next_tick = 0.0
        while not self._is_done():
            ready = [key.fileobj for key, _ in self._selector.select(self._settings.period / 4)]
            are_members = all(it in self._members for it in ready)
            # A rank that is gone comes first: mpiexec may have ended the others because of it.
            for it in sorted(ready, key=lambda it: it is self._signals):
                if isinstance(it, Channel):
                    self._hear(it)
                elif it is self._signals and not self._signals.hear():
                    self._selector.unregister(it)
            now = self._clock.read()
            for channel, member in self._listener.serve(now):
                self._welcome(channel, member)
            if self._is_ending:
                if now >= self._end_at and not self._is_told:
                    self._tell_to_end()
            elif now >= next_look:
                next_look = now + self._settings.period
                if now >= next_tick:
                    next_tick = now + self._settings.seconds_between_ticks
                    self._broadcast(Tick())
                self._judge()
            if ready and are_members:
                self._let_messages_collect()
        if self._is_ending and not self._is_told:  # all ranks ended by themselves
            self._tell_to_end()  # the launcher
            self._end_mpiexec()
        if self._launcher is not None:
            self._launcher.send(Go())  # unless it has been told to end the job
            self._launcher.close()

    def _let_messages_collect(self) -> None:
        """Wait a little, unless a rank is gone: then mpiexec may soon end the others."""
        if self._ends is None:
            return
        for file, _ in self._ends.poll(self._settings.period * _PAUSE):
            for channel in [member for member in self._members if member.fileno() == file]:
                while channel in self._members:
                    self._hear(channel)

    @property
    def _is_ending(self) -> bool:
        return self._end_at < float("inf")

    def _is_done(self) -> bool:
        if self._members:
            return self._clock.read() > self._end_at + _SECONDS_FOR_RANKS
        return self._starter is None or not self._starter.is_alive()

    def _welcome(self, channel: Channel, member: Member) -> None:
        if self._launcher is None and not self._members:  # not before: ranks may kill this process
            self._launcher = connect(MONITOR)
        now = self._clock.read()
        self._members[channel] = RankState(member.rank, member.host, member.pid, heard_at=now)
        self._starter = None
        self._selector.register(channel, selectors.EVENT_READ)
        if self._ends is not None:
            self._ends.register(channel.fileno(), select.EPOLLRDHUP)

    def _hear(self, channel: Channel) -> None:
        try:
            for message in channel.receive(OF_RANK):
                self._take(channel, message)
        except ConnectionError as error:
            self._selector.unregister(channel)
            channel.close()
            lost = self._members.pop(channel)
            text = (
                f"{lost.name} (process {lost.pid}) disappeared first, without a message: it was "
                "killed, it crashed, or it called os._exit."
            )
            if isinstance(error, MalformedError):
                text = (
                    f"{lost.name} (process {lost.pid}) sent something that a rank never sends "
                    f"({error})."
                )
            if self._may_leave or self._is_ending:
                return
            host = lost.host
            if not isinstance(error, MalformedError) and (cause := self._cause_outside()):
                text, host, self._is_ended_from_outside = cause, "", True
            self._end(text, _SECONDS_FOR_MPIEXEC, host)

    def _cause_outside(self) -> str:
        """Describe what has ended all ranks, rather than one of them first, if anything has."""
        if self._signals.have_ended_the_job():
            return (
                "mpiexec, or the whole job, got SIGTERM or SIGHUP, for example from kill, "
                "timeout, a scheduler or a closed terminal."
            )
        if self._launchers and not self._launchers[-1].is_alive():
            return "mpiexec was killed, for example by SIGHUP from a closed terminal."
        return ""

    def _take(self, channel: Channel, message: Message) -> None:
        state = self._members[channel]
        state.heard_at = now = self._clock.read()
        if isinstance(message, Report):
            self._note(state, message, now)
        elif isinstance(message, Failing):  # the rank itself prints why
            if not self._is_ending:
                self._end_at, self._first, self._reason = now, state.rank, message.reason
        elif isinstance(message, Stop):
            self._may_leave = True
        elif isinstance(message, Expect):
            self._check_ranks(message.ranks)
            here = {member.rank for member in self._members.values()}
            with contextlib.suppress(OSError):  # then the list of addresses below is empty
                self._listener.expect({*from_ranges(message.ranks)} - here)
            channel.send(Listening(self._listener.addresses))
        elif isinstance(message, Absent):
            self._check_ranks(message.ranks)
            self._listener.expect_no_more(from_ranges(message.ranks))

    def _note(self, state: RankState, report: Report, now: float) -> None:
        calls = [*([report.main] if report.main else []), *report.others]
        for call in calls:
            self._check_ranks(call.members)
        heard = [call._replace(since=now - call.since) for call in calls]
        state.main_wait = heard.pop(0) if report.main else None
        state.other_waits = heard
        state.counts.update(report.counts)
        state.place = report.place
        if report.left and state.left_at is None:
            state.left_at = now
            if all(member.left_at is not None for member in self._members.values()):
                self._may_leave = True
                self._broadcast(Go())

    def _check_ranks(self, ranges: str) -> None:
        """Raise MalformedError unless these are ranks of the job."""
        try:
            is_right = last_of(ranges) < self._settings.size
        except ValueError:
            is_right = False
        if not is_right:
            raise MalformedError(
                f"expected ranks below {self._settings.size}, got {ranges[:60]!r}"
            )

    def _judge(self) -> None:
        now, limit = self._clock.read(), self._settings.limit
        for verdict in Judge(self._members.values(), now, limit).verdicts():
            if verdict.is_fatal:
                self._end(verdict.text, lost=verdict.lost)
                break
            if now - self._warned_at.get(verdict.subject, -limit) >= limit:
                self._warned_at[verdict.subject] = now
                print_at_once(f"chainermn: {verdict.text}")

    def _end(self, text: str, patience: float = SECONDS_FOR_OUTPUT, lost: str = "") -> None:
        """Unless the job is already ending, print why it must end, and end it soon after."""
        if not self._is_ending:
            print_at_once(f"chainermn: {text}\nEnding the whole job.", self._file)
            self._end_at, self._lost = self._clock.read() + patience, lost

    def _tell_to_end(self) -> None:
        if self._first is None:
            lately = self._clock.read() - 3 * self._settings.period - _SECONDS_FOR_MPIEXEC
            able = [state.rank for state in self._members.values() if state.heard_at > lately]
            self._first = min(able, default=None)
        self._broadcast(End(self._first, self._reason, self._lost))
        self._is_told = True

    def _end_mpiexec(self) -> None:
        """Kill MPICH's mpiexec, which would exit with 0 if a rank has called ``os._exit(0)``.

        It is still running, because this process keeps a rank's standard error open. If something
        has ended it from outside, it only gets the time to end.
        """
        if self._is_mpich:
            time.sleep(SECONDS_HELD + SECONDS_FOR_OUTPUT)
            for launcher in reversed(self._launchers):
                if not self._is_ended_from_outside:
                    launcher.kill()

    @property
    def _file(self) -> int:
        """The file for messages: mpiexec's, if it no longer passes on what ranks print."""
        if self._errors is None or not self._is_ended_from_outside:
            return 2
        return 2 if self._is_mpich and self._launchers[-1].is_alive() else self._errors

    @property
    def _is_mpich(self) -> bool:
        """Whether MPICH's mpiexec has started the job."""
        return any(launcher.name.startswith("hydra_") for launcher in self._launchers)

    def _broadcast(self, message: Message) -> None:
        data = encode(message)
        for channel in filter(None, (*self._members, self._launcher)):
            channel.send_encoded(data)
