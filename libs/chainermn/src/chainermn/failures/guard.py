"""The guard: a process on each host that ends the job if other ranks never start.

A thread of a rank cannot do this, because mpi4py initializes MPI without releasing the GIL. If a
rank exits before it initializes MPI, MPICH 5.0.2's ``mpiexec`` lets the others wait forever,
whatever the exit code; Open MPI 5.0.11's ends the job. If a rank hangs before it, both wait.

The guard also keeps a dead rank's files open for a moment: see `guarded.hold_files`. It ends as
soon as no rank on the host needs it.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import struct
import time
from typing import NamedTuple

from chainermn.failures.ending import print_at_once, start_reaper
from chainermn.failures.launcher import GUARD, tell_end
from chainermn.failures.limits import report_delay
from chainermn.failures.wait import as_ranges
from chainermn.process.patience import AwakeClock
from chainermn.process.processes import (
    Numbers,
    Process,
    all_processes,
    environment_of,
    find,
    launchers_of,
    numbers_in,
)

_PERIOD = 0.25
# mpiexec may still be starting ranks, or be about to end the job itself.
_SECONDS_TO_BE_SURE = 1.5
# Time for the rank that started the guard to connect, unless it has been killed.
_SECONDS_FOR_THE_FIRST = 60.0
#: Seconds that files stay open after their rank has died.
SECONDS_HELD = 0.5

#: Messages from ranks. The rank follows the first; a file descriptor comes with the second.
STARTING, HOLD, LEAVING = b"starting ", b"hold", b"leaving"


class Waiting(NamedTuple):
    """A rank that waits for the others in `start_up.starting`."""

    rank: int
    process: Process
    since: float


def main(listener: int, numbers: tuple[int, int, int], limit: float) -> None:
    """Guard the ranks that connect. The rank with these numbers has started this process.

    Their start may take ``limit`` seconds; 0 means no limit.
    """
    Guard(socket.socket(fileno=listener), Numbers(*numbers), limit).run()


class Guard:
    """Watches over the starting ranks of a host."""

    def __init__(self, listener: socket.socket, numbers: Numbers, limit: float) -> None:
        self._listener = listener
        self._numbers = numbers
        self._limit = limit or float("inf")
        self._host = socket.gethostname()
        self._clock = AwakeClock(2 * _PERIOD)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, Waiting] = {}
        # Files to keep open until their ranks leave.
        self._held: dict[socket.socket, int] = {}
        self._launcher: Process | None = None
        # The living ranks of the host, and those that were alive when one was first found missing.
        # Later, others may have been ended because of that one.
        self._here: dict[int, Process] = {}
        self._left: dict[int, Process] = {}
        self._missing_since = float("inf")
        # Whether the job is ending.
        self._is_over = False

    def run(self) -> None:
        """Listen and look until no rank is connected any more or the job ends."""
        next_look = _PERIOD
        while not self._is_over:
            # While no rank is waiting, there is nothing to do except listen.
            patience = _PERIOD if self._waiting else _SECONDS_FOR_THE_FIRST
            for key, _ in self._selector.select(patience):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._hear(key.fileobj)
            if not self._is_over and len(self._selector.get_map()) == 1:
                return
            now = self._clock.read()
            if self._waiting and now >= next_look:
                next_look = now + _PERIOD
                self._look(now)
        time.sleep(SECONDS_HELD)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            self._end_for_lack_of_files(error)
            return
        if peer_of(connection)[1] == os.getuid():
            self._selector.register(connection, selectors.EVENT_READ)
        else:
            connection.close()

    def _hear(self, connection: socket.socket) -> None:
        try:
            message, files, _, _ = socket.recv_fds(connection, 64, 1)
        except OSError:
            message, files = b"", []
        if message.startswith(STARTING):
            process = find(peer_of(connection)[0])
            if process is not None:
                rank = int(message.removeprefix(STARTING))
                self._waiting[connection] = Waiting(rank, process, self._clock.read())
                launchers = launchers_of(process.pid)
                self._launcher = launchers[0] if launchers else None
        elif files:
            self._held[connection] = files[0]
        else:
            self._waiting.pop(connection, None)
            if connection in self._held:
                if message == LEAVING:
                    os.close(self._held.pop(connection))
                else:
                    self._is_over = True
            self._selector.unregister(connection)
            connection.close()

    def _look(self, now: float) -> None:
        """Find ranks that are missing on this host or that have waited too long."""
        size, local_size = self._numbers.size, self._numbers.local_size
        self._count_ranks(now)
        first = min(self._waiting.values(), key=lambda waiting: waiting.rank)
        if now - self._missing_since > _SECONDS_TO_BE_SURE:
            left = sorted(self._left)
            absent = f"of the {local_size} ranks on {self._host}, all except {as_ranges(left)}"
            if local_size == size:
                gone = [other for other in range(size) if other not in self._left]
                absent = f"rank{'s'[: len(gone) > 1]} {as_ranges(gone)} on {self._host}"
            self._end(
                first.process,
                f"{absent} ended before create_communicator, where rank {first.rank} on "
                f"{self._host} is waiting. Output above may say why.",
                lost=self._host,
            )
            return
        longest = min(self._waiting.values(), key=lambda waiting: waiting.since)
        if now - longest.since > self._limit:
            come = {waiting.rank for waiting in self._waiting.values()}
            late = as_ranges([other for other in sorted(self._here) if other not in come])
            here = as_ranges(sorted(self._here)) or "unknown"
            self._end(
                longest.process,
                f"rank {longest.rank} on {self._host} has waited for {now - longest.since:.0f} s "
                "in create_communicator for ranks that have not called it. Running on this host: "
                f"ranks {here} of {size}{late and f'; not yet in create_communicator: {late}'}. "
                "CHAINERMN_STALL_LIMIT sets how long to wait.",
                after=report_delay(longest.rank),
            )

    def _count_ranks(self, now: float) -> None:
        """Update the living ranks that the launcher has started on this host."""
        here = {rank: process for rank, process in self._here.items() if process.is_alive()}
        if len(here) < self._numbers.local_size:
            here |= self._find_ranks()
        has_found = not here.keys() <= self._here.keys()
        self._here = here
        if not 0 < len(here) < self._numbers.local_size:
            self._missing_since = float("inf")
        elif has_found or self._missing_since == float("inf"):
            self._missing_since, self._left = now, here

    def _find_ranks(self) -> dict[int, Process]:
        found: dict[int, Process] = {}
        if self._launcher is None:
            return found
        for process in all_processes():
            if process.parent == self._launcher.pid and not process.is_helper:
                numbers = numbers_in(environment_of(process.pid))
                if numbers is not None:
                    found[numbers.rank] = process
        return found

    def _end_for_lack_of_files(self, error: OSError) -> None:
        """End the job, because a rank that cannot connect would wait unguarded."""
        self._is_over = True
        self._waiting.clear()
        pids = []
        for key in self._selector.get_map().values():
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj is not self._listener:
                pids.append(peer_of(key.fileobj)[0])
                key.fileobj.close()  # ending the job also needs files
        rank = next(filter(None, map(find, pids)), None)
        if rank is None:
            raise error
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._end(
            rank,
            f"the process that guards the ranks on {self._host} while they start cannot open "
            f"another file ({error.strerror}). It needs up to two for each of the "
            f"{self._numbers.local_size} ranks, but its limit is {most}. Raise the limit on that "
            "host, for example with ulimit -n 4096, or start fewer ranks there.",
        )

    def _end(self, rank: Process, text: str, *, after: float = 0.0, lost: str = "") -> None:
        time.sleep(after)
        if rank.is_alive():  # nobody else was first
            self._is_over = True
            print_at_once(f"chainermn: {text}\nEnding the whole job.")
            tell_end(GUARD, lost)
            start_reaper(rank.pid)
            rank.kill()  # makes mpiexec end the others


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a connection."""
    form = "3i"
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form))
    pid, user, _ = struct.unpack(form, data)
    return pid, user
