"""The watch: every rank reports to the monitor what it does, and ends when it is told to."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from chainermn.failures import activity
from chainermn.failures.activity import world_ranks
from chainermn.failures.channel import Channel, connect
from chainermn.failures.clock import AwakeClock
from chainermn.failures.ending import SECONDS_FOR_THE_FIRST, end_job
from chainermn.failures.hold import Hold, start_hold
from chainermn.failures.interrupts import Interrupts, stop_in_child
from chainermn.failures.monitor import Invitation, start_monitor
from chainermn.failures.settings import stall_limit
from chainermn.failures.wait import Wait, as_ranges

if TYPE_CHECKING:
    from mpi4py import MPI

# Seconds that a failing rank waits to learn whether another one has failed in the same way.
_SECONDS_FOR_AN_ANSWER = 1.0
#: Reason of ranks that an interrupt ends, wherever they are.
INTERRUPTED = "interrupted"
# Ranks that notice the same thing speak in turn, until one has ended the job.
_SECONDS_FOR_EACH = 0.3
_MOST_SECONDS = 3.0
# While a rank waits at its end, it gives MPI a chance to send messages this often.
_SECONDS_BETWEEN_PROBES = 0.02

_watch: Watch | None = None
_monitor: subprocess.Popen[bytes] | None = None
_hold: Hold | None = None
_has_joined = False


def join(mpi_comm: MPI.Intracomm) -> None:
    """Start to watch the ranks of ``mpi_comm``; a collective call.

    A process has one watch: nothing changes on ranks that have joined before.

    Warns
    -----
    UserWarning
        If ranks cannot connect to the monitor: MPI alone notices their failures.
    """
    global _watch, _monitor, _hold, _has_joined
    ranks = world_ranks(mpi_comm)
    if len(ranks) == 1 or min(ranks) < 0:  # alone, or among processes started later
        return
    everywhere = mpi_comm.allgather((_has_joined, _watch and _watch.invitation))
    if all(has_joined for has_joined, _ in everywhere):
        return
    invitation = next((found for _, found in everywhere if found), None)
    if not any(has_joined for has_joined, _ in everywhere):
        if mpi_comm.rank == 0:
            with contextlib.suppress(OSError):
                invitation, _monitor = start_monitor(len(ranks), stall_limit())
        invitation = mpi_comm.bcast(invitation)
    if not _has_joined:
        _has_joined = True
        _watch = Watch.accept(invitation, ranks[mpi_comm.rank]) if invitation else None
        _hold = start_hold() if _watch else None
        os.register_at_fork(after_in_child=_stop_in_child)
        atexit.register(leave)
    unwatched = [
        rank for rank, it in zip(ranks, mpi_comm.allgather(bool(_watch)), strict=True) if not it
    ]
    if unwatched and mpi_comm.rank == 0:
        warnings.warn(
            f"ranks {as_ranges(unwatched)} cannot connect to rank {ranks[0]} by TCP on any port, "
            "perhaps because of a firewall. If one of them fails in a way that MPI does not see, "
            "the others will wait forever",
            stacklevel=3,
        )


def is_on() -> bool:
    """Tell whether this rank is watched."""
    return _watch is not None


def say_failing(reason: str) -> bool:
    """Announce that this rank is about to print what has failed, and to end the job.

    Parameters
    ----------
    reason : str
        The same on ranks that fail in the same way: only one of them prints it.

    Returns
    -------
    bool
        Whether this rank has to print it, because no other one was first with the same reason.
    """
    return _watch is None or _watch.say_failing(reason)


def leave() -> None:
    """Wait, while watching, until all ranks have reached the end of their scripts."""
    if _watch is not None:
        _watch.leave()
    if _monitor is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _monitor.wait(_MOST_SECONDS)
    if _hold is not None:
        _hold.release()


def _digest(reason: str) -> str:
    return hashlib.sha256(reason.encode(errors="replace")).hexdigest()


def _doing() -> str:
    calls = [wait.name for wait, is_main in activity.waits() if is_main]
    return " ".join([*(f"in {call}," for call in calls), f"at {activity.place()}"])


def _stop_in_child() -> None:
    """Make a forked child forget the watch, which its parent keeps."""
    global _watch, _monitor, _hold
    if _watch is not None:
        _watch.close_in_child()
    if _hold is not None:
        _hold.close_in_child()
    _watch = _monitor = _hold = None


class Watch(threading.Thread):
    """Thread that reports what this rank does, and ends it when the monitor says so.

    Parameters
    ----------
    invitation : Invitation
    rank : int
        Rank of this process in ``COMM_WORLD``.
    channel : Channel
        Connection to the monitor.
    """

    def __init__(self, invitation: Invitation, rank: int, channel: Channel) -> None:
        super().__init__(name="chainermn-watch", daemon=True)
        self.invitation = invitation
        self._rank = rank
        self._channel = channel
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        self._interrupts = Interrupts(self._wake_writer)
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._clock = AwakeClock(2 * invitation.period)
        self._heard_at = 0.0
        self._seen_at: dict[Wait, float] = {}
        self._counts: dict[str, int] = {}
        self._is_leaving = self._is_over = False
        self._released = threading.Event()
        # The rank that ends the job, and its reason.
        self._told_to_end = threading.Event()
        self._first: int | None = None
        self._reason = ""

    @classmethod
    def accept(cls, invitation: Invitation, rank: int) -> Watch | None:
        """Join a monitor and start the watch; return None if the monitor cannot be reached."""
        channel = connect(invitation.addresses, invitation.port, {"token": invitation.token})
        if channel is None:
            return None
        join = {"kind": "join", "rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        if not channel.ask(join):
            channel.close()
            return None
        watch = cls(invitation, rank, channel)
        watch.start()
        return watch

    def run(self) -> None:
        """Report and listen until all ranks have left."""
        next_report = 0.0
        while not self._is_over:
            for key, _ in self._selector.select(self.invitation.period / 2):
                if key.fileobj is self._channel:
                    self._hear()
                else:
                    self._interrupts.note(os.read(self._wake_reader, 1024))
                    next_report = 0.0
            now = self._clock.read()
            if now >= next_report:
                next_report = now + self.invitation.period
                self._report()
            self._check_silence(now)
            if self._interrupts.are_ignored():
                end_job(
                    f"chainermn: {self._me} was interrupted while it was at "
                    f"{activity.place()}, and did not react. The whole job is being ended.",
                    after=self._turn,
                )
        self._channel.close()
        self._released.set()

    def say_failing(self, reason: str) -> bool:
        """See `say_failing`. Must not run in the thread of the watch, which hears the answer."""
        self._channel.send({"kind": "failing", "reason": _digest(reason)})
        self._told_to_end.wait(_SECONDS_FOR_AN_ANSWER)
        return self._first == self._rank or self._reason != _digest(reason)

    def leave(self) -> None:
        """See `leave`."""
        self._is_leaving = True
        os.write(self._wake_writer, b"\0")
        mpi: Any = sys.modules["mpi4py.MPI"]
        try:
            while not self._released.wait(_SECONDS_BETWEEN_PROBES):
                # Messages of this rank may still be on their way, and only MPI's calls move them.
                if not mpi.Is_finalized():
                    mpi.COMM_WORLD.Iprobe()
        except KeyboardInterrupt:
            end_job(
                f"chainermn: {self._me} was interrupted at its end, where it waited for the "
                "others. The whole job is being ended.",
                announce=lambda: self.say_failing(INTERRUPTED),
            )

    def close_in_child(self) -> None:
        """Close a forked child's copies of the connections."""
        stop_in_child()
        self._channel.close()
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    @property
    def _me(self) -> str:
        return f"rank {self._rank} on {socket.gethostname()}"

    @property
    def _turn(self) -> float:
        """Seconds to wait if other ranks may be about to print the same."""
        return min(self._rank * _SECONDS_FOR_EACH, _MOST_SECONDS)

    def _hear(self) -> None:
        try:
            messages = self._channel.receive()
        except ConnectionError:
            end_job(
                "chainermn: the process that watches over the job on "
                f"{self.invitation.host} has been killed. Reported by {self._me}.\n"
                "The whole job is being ended.",
                after=self._turn,
            )
        self._heard_at = self._clock.read()
        for message in messages:
            if message["kind"] == "go":
                self._is_over = True
            elif message["kind"] == "end":
                self._first, self._reason = message["first"], message["reason"]
                self._told_to_end.set()
                is_first = self._first == self._rank
                end_job("", after=0 if is_first else SECONDS_FOR_THE_FIRST)

    def _report(self) -> None:
        now, waits = self._clock.read(), activity.waits()
        self._seen_at = {wait: self._seen_at.get(wait, now) for wait, _ in waits}
        counts = activity.counts()

        def described(wait: Wait) -> list[Any]:
            longest = now - self._seen_at[wait] + self.invitation.period
            seconds = min(time.monotonic() - wait.since, longest)
            return [*wait[:4], seconds, wait.caller]

        self._channel.send(
            {
                "kind": "report",
                "main": next((described(wait) for wait, is_main in waits if is_main), None),
                "others": [described(wait) for wait, is_main in waits if not is_main],
                "counts": dict(counts.items() - self._counts.items()),
                "place": activity.place(),
                "left": self._is_leaving,
            }
        )
        self._counts = counts

    def _check_silence(self, now: float) -> None:
        silence, limit = now - self._heard_at, self.invitation.limit
        if limit and silence > limit:
            end_job(
                f"chainermn: nothing has come from {self.invitation.host} for {silence:.0f} s: "
                f"that host or the network is down. Reported by {self._me}, {_doing()}.\n"
                "The whole job is being ended.",
                after=self._turn,
            )
