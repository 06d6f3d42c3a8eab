"""Simulate any number of ranks in one process: all they do is report to a monitor.

    python -m benchmarks.simulated_ranks 512 --seconds 60

prints as JSON what the monitor of 512 ranks costs, and how soon it says what is wrong.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from chainermn.connections.channel import Channel
from chainermn.connections.messages import Member
from chainermn.failures.messages import OF_MONITOR, Report
from chainermn.failures.settings import PURPOSE, WatchSettings, start_monitor
from chainermn.failures.wait import Wait, as_ranges

#: Seconds of silence or waiting after which the watch ends a job.
STALL_LIMIT = 6.0
#: How many times each rank reports before anything is measured.
FIRST_REPORTS = 3
# Ten times the limit that the watch promises.
_PATIENCE = 10 * (10.0 + STALL_LIMIT)
CPU = "% of a core"
MEMORY, GROWTH = "MiB", "KiB more at the end"
PLACE = (
    "/home/user/train.py:123 in main, now in "
    "/usr/lib/python3/site-packages/chainermn/transport/host/mpi.py:210 in allreduce"
)


class Ranks:
    """Channels of ranks that train: in each report they wait in the next all-reduce.

    Parameters
    ----------
    size : int
    settings : WatchSettings
        Settings of the watch.
    """

    def __init__(self, size: int, settings: WatchSettings) -> None:
        self.period = settings.period
        self.members = as_ranges(range(size))
        self.stream = f"communicator 1 of ranks {self.members}"
        self.channels: list[Channel] = []
        self.reported_at: dict[int, float] = {}
        for rank in range(size):
            member = Member(rank, PURPOSE, f"host{rank // 8:02}", rank)
            channel = settings.endpoint.join(member)
            assert channel is not None
            self.channels.append(channel)

    def report(self, rank: int, number: int, stream: str = "", **what: Any) -> None:
        """Report that a rank has been in a call for half a period."""
        stream = stream or self.stream
        call = Wait(stream, number, "allreduce", self.members, self.period / 2)
        usual = Report(call, [], {stream: number}, PLACE, left=False)
        self.channels[rank].send(usual._replace(**what))
        self.reported_at[rank] = time.monotonic()

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def train(
        self, is_over: Callable[[], bool], report: Callable[[int, int], None] | None = None
    ) -> None:
        """Report once per period, each rank at another time, until ``is_over`` returns true."""
        report = report or self.report
        start = time.monotonic()
        for number in itertools.count(1):
            for rank, channel in enumerate(self.channels):
                due = start + (number - 1 + rank / len(self.channels)) * self.period
                time.sleep(max(0.0, due - time.monotonic()))
                report(rank, number)
                channel.receive(OF_MONITOR)
                if is_over():
                    return


class Monitored:
    """A monitor, the ranks that it watches, and its messages."""

    def __init__(self, size: int, limit: float) -> None:
        reader, writer = os.pipe()
        before = os.dup(2)
        os.dup2(writer, 2)
        try:
            settings, self.process = start_monitor(range(size), size, limit, is_one_host=True)
        finally:
            os.dup2(before, 2)
            os.close(before)
            os.close(writer)
        os.set_blocking(reader, False)
        self._reader, self._said = reader, b""
        self.ranks = Ranks(size, settings)

    def said(self) -> str:
        """Return the messages of the monitor on standard error."""
        try:
            while part := os.read(self._reader, 1 << 16):
                self._said += part
        except BlockingIOError:
            pass
        return self._said.decode()

    def wait_for(self, text: str, report: Callable[[int, int], None] | None = None) -> float:
        """Continue until the monitor prints a text. Return that time of ``time.monotonic``."""
        is_too_late = after(_PATIENCE)
        self.ranks.train(lambda: text in self.said() or is_too_late(), report)
        if text not in self.said():
            raise RuntimeError(f"the monitor should have said {text!r}, and said {self.said()!r}")
        return time.monotonic()

    def seconds_of_cpu(self) -> float:
        """Return the processor time of the monitor so far."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Return the resident memory of the monitor, in bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * float(os.sysconf("SC_PAGE_SIZE"))

    def close(self) -> None:
        self.ranks.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._reader)


@contextmanager
def monitored(size: int, limit: float) -> Iterator[Monitored]:
    """Start a monitor and ranks that have reported a few times."""
    it = Monitored(size, limit)
    try:
        reports = itertools.count(1)
        it.ranks.train(lambda: next(reports) == FIRST_REPORTS * size)
        yield it
    finally:
        it.close()


def after(seconds: float) -> Callable[[], bool]:
    """Return a function that returns whether this time has passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def cost(size: int, seconds: float) -> dict[str, float]:
    """Return the processor time and memory of the monitor while all is well."""
    with monitored(size, 300.0) as it:
        memory, cpu, start = it.memory(), it.seconds_of_cpu(), time.monotonic()
        it.ranks.train(after(seconds))
        share = (it.seconds_of_cpu() - cpu) / (time.monotonic() - start)
        assert it.said() == "", it.said()
        return {
            CPU: 100 * share,
            MEMORY: it.memory() / 2**20,
            GROWTH: (it.memory() - memory) / 2**10,
        }


def death(size: int) -> float:
    """Return the seconds until the monitor notices a closed connection."""
    with monitored(size, 300.0) as it:
        it.ranks.channels.pop().close()
        start = time.monotonic()
        return it.wait_for("disappeared first, without a message") - start


def leaving(size: int) -> float:
    """Return the seconds until the monitor says that a rank has left while others wait for it."""

    def report(rank: int, number: int) -> None:
        if rank == size - 1:
            it.ranks.report(rank, 0, main=None, left=True)
        else:
            it.ranks.report(rank, 1000)

    with monitored(size, 300.0) as it:
        start = time.monotonic()
        return it.wait_for("has ended its script", report) - start


def silence(size: int) -> float:
    """Return the seconds from the stall limit until the monitor names a silent rank."""

    def report(rank: int, number: int) -> None:
        if rank < size - 1:
            it.ranks.report(rank, 1000 + number)

    with monitored(size, STALL_LIMIT) as it:
        start = it.ranks.reported_at[size - 1]
        return it.wait_for("has been silent for", report) - start - STALL_LIMIT


def deadlock(size: int) -> float:
    """Return the seconds from the stall limit until the monitor reports a deadlock."""

    def report(rank: int, number: int) -> None:
        stream = f"communicator {2 + rank % 2} of ranks {it.ranks.members}"
        call = Wait(stream, 1, "allreduce", it.ranks.members, time.monotonic() - start)
        it.ranks.report(rank, 1, stream, main=call)

    with monitored(size, STALL_LIMIT) as it:
        start = time.monotonic()
        return it.wait_for("these ranks wait for each other", report) - start - STALL_LIMIT


#: Faults, and the functions that measure how soon they are reported.
WRONG = {
    "a rank dies, s": death,
    "a rank leaves, s": leaving,
    "silence, s": silence,
    "deadlock, s": deadlock,
}


@click.command()
@click.argument("size", type=int)
@click.option(
    "--seconds", default=30.0, show_default=True, help="How long to measure while all is well."
)
def main(size: int, seconds: float) -> None:
    """Print what a monitor of SIZE ranks costs, and how soon it says what is wrong."""
    found = cost(size, seconds)
    found |= {name: measure(size) for name, measure in WRONG.items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
