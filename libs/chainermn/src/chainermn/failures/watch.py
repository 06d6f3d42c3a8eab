"""The watch: each rank reports its activity to the monitor, and ends when told to."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from chainermn.connections.channel import Channel, MalformedError
from chainermn.connections.joining import Endpoint
from chainermn.connections.messages import Address, Message
from chainermn.failures import activity
from chainermn.failures.activity import world_ranks
from chainermn.failures.ending import SECONDS_FOR_THE_FIRST, end_job, use_terminal
from chainermn.failures.guarded import hold_files, release_files
from chainermn.failures.limits import report_delay, stall_limit
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
)
from chainermn.failures.settings import WatchSettings, start_monitor
from chainermn.failures.wait import Wait, as_ranges
from chainermn.process.helper import end_of
from chainermn.process.main_thread import Interrupts, place
from chainermn.process.patience import AwakeClock
from chainermn.process.processes import numbers_in

if TYPE_CHECKING:
    from mpi4py import MPI

#: Common reason of all ranks that an interrupt ends.
INTERRUPTED = "interrupted"
# Seconds that the monitor gets to listen again.
_SECONDS_FOR_LISTENING = 30.0
# A process closes its connections a moment before others see its end.
_SECONDS_TO_END = 1.0
# Seconds that the monitor gets to notice that all ranks are gone.
_SECONDS_FOR_THE_MONITOR = 3.0
# How often a rank that waits at its end lets MPI send messages.
_SECONDS_BETWEEN_PROBES = 0.02

_watch: Watch | None = None
_monitor: subprocess.Popen[bytes] | None = None
_has_joined = False


def join(mpi_comm: MPI.Intracomm) -> None:
    """Start to watch the ranks of ``mpi_comm``; a collective call.

    A process has one watch: nothing changes on ranks that have already joined. Warns about ranks
    that cannot connect to the monitor, since only MPI may notice their failures.
    """
    global _watch, _monitor, _has_joined
    ranks = world_ranks(mpi_comm)
    if len(ranks) == 1 or min(ranks) < 0:  # alone, or among processes started later
        return
    # Use few collectives, because they are slow if many ranks share a core.
    known, new, monitor, lack = _watch and _watch.settings, None, None, ""
    if mpi_comm.rank == 0 and known is None:
        from mpi4py import MPI

        numbers = numbers_in(os.environ)
        is_one_host = numbers is not None and numbers.local_size == numbers.size
        try:
            new, monitor = start_monitor(
                ranks, MPI.COMM_WORLD.size, stall_limit(), is_one_host=is_one_host
            )
        except OSError as error:
            lack = error.strerror or str(error)
    everywhere = mpi_comm.allgather((_has_joined, known, new))
    newcomers = [
        rank for rank, (has_joined, _, _) in zip(ranks, everywhere, strict=True) if not has_joined
    ]
    watched = next((number for number, (_, it, _) in enumerate(everywhere) if it), None)
    if monitor is not None and (watched is not None or not newcomers):
        monitor.kill()
        monitor.wait()
    elif monitor is not None:
        _monitor = monitor
    if not newcomers:
        return
    settings = everywhere[0][2]
    if watched is not None:  # its monitor has stopped listening
        endpoint = None
        if _watch is not None and mpi_comm.rank == watched:
            endpoint = _watch.endpoint_for(newcomers)
        settings = everywhere[watched][1]._replace(endpoint=mpi_comm.bcast(endpoint, watched))
    if not _has_joined:
        _has_joined = True
        rank = ranks[mpi_comm.rank]
        if channel := settings and settings.connect(rank):
            _watch = Watch(settings, rank, channel)
            _watch.start()
            _watch.held = hold_files()
        os.register_at_fork(after_in_child=_stop_in_child)
        atexit.register(leave)
    is_watched = bytearray(len(ranks))
    mpi_comm.Allgather(bytes([_watch is not None]), is_watched)
    unwatched = [rank for rank, it in zip(ranks, is_watched, strict=True) if not it]
    if unwatched and _watch is not None:
        _watch.say_absent(unwatched)
    if unwatched and mpi_comm.rank == 0:
        if _watch is None and _monitor and (end := end_of(_monitor, _SECONDS_TO_END)):
            lack = f"chainermn-monitor has {end}"
        warnings.warn(_warning_about(lack, unwatched, ranks[0]), stacklevel=3)


def _warning_about(lack: str, ranks: Sequence[int], root: int) -> str:
    """Say that ranks are not watched, because of ``lack`` or, if that is empty, of the network."""
    if lack:
        why, which = f"no process watches over the job on {socket.gethostname()}: {lack}", "a rank"
    else:
        which = "one of them"
        why = (
            f"ranks {as_ranges(ranks)} cannot connect to rank {root} by TCP on any port, perhaps "
            "because of a firewall, or because they are in containers with separate networks (use "
            "docker run --network=host)"
        )
    return (
        f"{why}. If {which} fails in a way that MPI does not notice, the others will wait forever"
    )


def is_on() -> bool:
    """Tell whether this rank is watched."""
    return _watch is not None


def say_failing(reason: str) -> bool:
    """Announce that this rank is about to print what has failed and to end the job.

    The reason is equal on ranks that fail in the same way. Returns True if this rank has to print
    it, because no other rank was first with the same reason.
    """
    return _watch is None or _watch.say_failing(reason)


def stop_watching() -> None:
    """Silence the watch, because something else is about to end all ranks for a known reason."""
    if _watch is not None:
        _watch.stop()


def at_end(function: Callable[[], None]) -> None:
    """Call a function at the end of this process, once all ranks have reached their ends.

    A forked child does not call it.
    """
    pid = os.getpid()

    def call() -> None:
        if os.getpid() == pid:
            function()

    atexit.register(call)
    atexit.unregister(leave)
    atexit.register(leave)  # registered last, so it is called first


def leave() -> None:
    """Keep watching until all ranks have reached the end of their scripts."""
    if _watch is not None:
        _watch.leave()
    if _monitor is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _monitor.wait(_SECONDS_FOR_THE_MONITOR)


def _stop_in_child() -> None:
    """Make a forked child forget the watch, which its parent keeps.

    The child closes its copies of the connections, because their closing shows that the parent is
    gone.
    """
    global _watch, _monitor
    if _watch is not None:
        _watch.close_in_child()
    _watch = _monitor = None


class Watch(threading.Thread):
    """A thread that reports a rank's activity to the monitor, and ends the rank when told to."""

    def __init__(self, settings: WatchSettings, rank: int, channel: Channel) -> None:
        super().__init__(name="chainermn-watch", daemon=True)
        self.settings = settings
        #: Connection that keeps this rank's files open, as returned by `hold_files`.
        self.held: socket.socket | None = None
        use_terminal(settings.has_terminal)
        self._rank = rank
        self._me = f"rank {rank} on {socket.gethostname()}"
        self._channel = channel
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        self._interrupts = Interrupts(self._wake_writer)
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._clock = AwakeClock(2 * settings.period)
        self._heard_at = 0.0
        self._seen_at: dict[Wait, float] = {}
        self._counts: dict[str, int] = {}
        self._is_leaving = self._is_over = False
        self._released = threading.Event()
        # Addresses on which the monitor listens for others, once asked to.
        self._listening = threading.Event()
        self._addresses: list[Address] = []
        # The rank that ends the job, and its reason.
        self._told_to_end = threading.Event()
        self._first: int | None = None
        self._reason = ""

    def run(self) -> None:
        """Report and listen until all ranks have left."""
        next_report = 0.0
        while not self._is_over:
            for key, _ in self._selector.select(self.settings.period / 2):
                if key.fileobj is self._channel:
                    self._hear()
                else:
                    self._interrupts.note(os.read(self._wake_reader, 1024))
                    next_report = 0.0
            now = self._clock.read()
            if now >= next_report:
                next_report = now + self.settings.period
                self._report(now)
            self._check_silence(now)
            if self._interrupts.are_ignored():
                self._end(
                    f"{self._me} was interrupted while it was at {place()}, and did not react.",
                    after=report_delay(self._rank),
                )
        self._channel.close()
        self._released.set()

    def say_failing(self, reason: str, *, patience: float = 1.0) -> bool:
        """See `say_failing`. Not for the thread of the watch, which hears the answer.

        It waits ``patience`` seconds to learn whether another rank has failed in the same way.
        """
        digest = hashlib.sha256(reason.encode(errors="replace")).hexdigest()
        self._channel.send(Failing(digest))
        self._told_to_end.wait(patience)
        return self._first == self._rank or self._reason != digest

    def stop(self) -> None:
        """See `stop_watching`."""
        self._channel.send(Stop())
        self._is_over = True

    def endpoint_for(self, ranks: Sequence[int]) -> Endpoint:
        """Ask the monitor to listen again for these ranks, which join after others."""
        self._listening.clear()
        self._addresses = []
        self._channel.send(Expect(as_ranges(ranks)))
        self._listening.wait(_SECONDS_FOR_LISTENING)
        return Endpoint(self._addresses, self.settings.endpoint.key)

    def say_absent(self, ranks: Sequence[int]) -> None:
        """Announce that these ranks cannot join, so that the monitor stops listening for them."""
        self._channel.send(Absent(as_ranges(ranks)))

    def leave(self) -> None:
        """See `leave`."""
        self._is_leaving = True
        os.write(self._wake_writer, b"\0")
        mpi: Any = sys.modules["mpi4py.MPI"]
        try:
            while not self._released.wait(_SECONDS_BETWEEN_PROBES):
                # This rank's messages may still be on their way, and only calls of MPI move them.
                if not mpi.Is_finalized():
                    mpi.COMM_WORLD.Iprobe()
        except KeyboardInterrupt:
            self._end(
                f"{self._me} was interrupted at its end, where it waited for the others.",
                announce=lambda: self.say_failing(INTERRUPTED),
            )
        if self.held is not None:
            release_files(self.held)

    def close_in_child(self) -> None:
        """Close a forked child's copies of the connections."""
        signal.set_wakeup_fd(-1)
        if self.held is not None:
            self.held.close()
        self._channel.close()
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _end(self, text: str, **how: Any) -> NoReturn:
        end_job(f"chainermn: {text}\nEnding the whole job.", **how)

    def _hear(self) -> None:
        try:
            for message in self._channel.receive(OF_MONITOR):
                self._take(message)
        except ConnectionError as error:
            how = "been killed"
            if isinstance(error, MalformedError):
                how = f"sent something that it never sends ({error})"
            elif _monitor is not None:
                how = end_of(_monitor, _SECONDS_TO_END) or "closed its connections"
            self._end(
                f"the process that watches over the job on {self.settings.host} has {how}. "
                f"Reported by {self._me}.",
                after=report_delay(self._rank),
                lost=self.settings.host,
            )
        self._heard_at = self._clock.read()

    def _take(self, message: Message) -> None:
        if isinstance(message, Go):
            self._is_over = True
        elif isinstance(message, End):
            self._first, self._reason = message.first, message.reason
            self._told_to_end.set()
            is_first = self._first == self._rank
            end_job("", after=0 if is_first else SECONDS_FOR_THE_FIRST)
        elif isinstance(message, Listening):
            self._addresses = message.addresses
            self._listening.set()

    def _report(self, now: float) -> None:
        waits, counts = activity.waits(), activity.counts()
        self._seen_at = {wait: self._seen_at.get(wait, now) for wait, _ in waits}
        report = Report(
            main=next((self._aged(wait, now) for wait, is_main in waits if is_main), None),
            others=[self._aged(wait, now) for wait, is_main in waits if not is_main],
            counts=dict(counts.items() - self._counts.items()),
            place=place(),
            left=self._is_leaving,
        )
        self._channel.send(report)
        self._counts = counts

    def _aged(self, wait: Wait, now: float) -> Wait:
        """Replace the start of a call with its age, without any time this process was stopped."""
        longest = now - self._seen_at[wait] + self.settings.period
        return wait._replace(since=min(time.monotonic() - wait.since, longest))

    def _check_silence(self, now: float) -> None:
        silence, limit = now - self._heard_at, self.settings.limit
        if limit and silence > limit:
            call = next((f"in {wait.name}, " for wait, is_main in activity.waits() if is_main), "")
            self._end(
                f"nothing has come from {self.settings.host} for {silence:.0f} s: that host or "
                f"the network is down. Reported by {self._me}, {call}at {place()}.",
                after=report_delay(self._rank),
                lost=self.settings.host,
            )
