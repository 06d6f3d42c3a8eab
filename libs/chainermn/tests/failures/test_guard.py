"""What a host's guard says and ends while a job starts. The ranks are stand-ins."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chainermn.failures import guard
from chainermn.failures.ending import start_reaper
from chainermn.process import patience
from chainermn.process.processes import Process
from libs.chainermn.tests.failures.conftest import select_with
from libs.chainermn.tests.process.stand_in_job import wait_for_the_end_of

HOST = socket.gethostname()

Watch = Callable[..., None]
Said = Callable[[], str]


class Seconds:
    """Time that only passes while the guard waits, and then at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    passing = Seconds()
    monkeypatch.setattr(guard, "time", passing)
    monkeypatch.setattr(patience, "time", passing)
    return passing


@pytest.fixture
def watch(seconds: Seconds, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Return a function that runs the guard on processes that stand in for ranks.

    Its arguments are the processes by rank, the number of ranks in all and on this host, the stall
    limit, and a function to call with the ranks' connections before each look.
    """
    reapers: list[subprocess.Popen[bytes] | None] = []
    opened: list[Any] = []

    def run(
        ranks: dict[int, Process],
        size: int,
        local_size: int,
        limit: float = 0.0,
        before_look: Callable[[dict[int, socket.socket]], None] = lambda connections: None,
    ) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")  # Linux picks an unused name
        listener.listen()
        connections = {
            rank: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for rank in ranks
        }
        pids = {}
        for rank, connection in connections.items():
            connection.bind("")
            pids[connection.getsockname()] = ranks[rank].pid
            connection.connect(listener.getsockname())
            connection.send(guard.STARTING + str(rank).encode())
        opened.extend([*connections.values(), listener])

        class Selector(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                if not (ready := super().select(0)):
                    seconds.sleep(timeout)
                    before_look(connections)
                return ready

        selector = Selector()
        select_with(selector, guard, monkeypatch)
        monkeypatch.setattr(guard, "peer_of", lambda it: (pids[it.getpeername()], os.getuid()))
        monkeypatch.setattr(
            guard, "start_reaper", lambda pid: reapers.append(start_reaper(pid, after=0))
        )
        guard.Guard(listener, guard.Numbers(0, size, local_size), limit).run()
        opened.extend(key.fileobj for key in selector.get_map().values())
        for reaper in filter(None, reapers):
            reaper.wait(60)

    yield run
    for each in opened:
        each.close()


def test_rank_of_this_host_has_ended(
    start_job: Any, watch: Watch, said: Said, launcher: Callable[[], str | None]
) -> None:
    job = start_job(3)
    job.end(1)
    watch({2: job.ranks[2]}, 3, 3)
    message = said()
    assert (
        f"chainermn: rank 1 on {HOST} ended before create_communicator, where "
        f"rank 2 on {HOST} is waiting."
    ) in message
    assert message.count("Ending the whole job.") == 1
    assert launcher() == HOST
    wait_for_the_end_of(*job.ranks, job.launcher)


def test_several_ranks_wait_and_it_is_said_once(start_job: Any, watch: Watch, said: Said) -> None:
    job = start_job(5)
    job.end(1)
    job.end(4)
    watch({rank: job.ranks[rank] for rank in (2, 0, 3)}, 5, 5)
    message = said()
    assert f"chainermn: ranks 1,4 on {HOST} ended before" in message
    assert f"where rank 0 on {HOST} is waiting." in message
    assert message.count("Ending the whole job.") == 1


def test_rank_ends_while_others_wait(
    start_job: Any, watch: Watch, said: Said, seconds: Seconds
) -> None:
    job = start_job(3)

    def before_look(connections: dict[int, socket.socket]) -> None:
        if seconds.now == 5:
            assert said() == ""
            job.end(1)
            connections[1].close()

    watch(dict(enumerate(job.ranks)), 3, 3, before_look=before_look)
    assert f"chainermn: rank 1 on {HOST} ended before" in said()


def test_rank_of_one_of_several_hosts_has_ended(start_job: Any, watch: Watch, said: Said) -> None:
    job = start_job(2)
    job.end(0)
    watch({1: job.ranks[1]}, 6, 2)
    assert f"chainermn: of the 2 ranks on {HOST}, all except 1 ended before" in said()
    wait_for_the_end_of(job.launcher)


@pytest.mark.parametrize(
    ("n_waiting", "size", "running"),
    [(1, 2, "0-1 of 2; not yet in create_communicator: 1"), (2, 4, "0-1 of 4")],
)
def test_ranks_have_not_come_within_the_limit(
    n_waiting: int, size: int, running: str, start_job: Any, watch: Watch, said: Said
) -> None:
    job = start_job(2, "prterun")
    watch(dict(enumerate(job.ranks[:n_waiting])), size, 2, limit=9.9)
    assert (
        f"rank 0 on {HOST} has waited for 10 s in create_communicator for ranks that have not "
        f"called it. Running on this host: ranks {running}. CHAINERMN_STALL_LIMIT sets"
    ) in said()
    wait_for_the_end_of(*job.ranks, job.launcher)


def test_rank_has_ended_and_the_limit_is_over_and_one_is_said(
    start_job: Any, watch: Watch, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(3)
    job.end(1)
    # As if the process were slow to die.
    monkeypatch.setattr(Process, "kill", lambda process: None)
    watch({2: job.ranks[2]}, 3, 3, limit=1.9)  # over when it is sure that rank 1 is missing
    message = said()
    assert f"chainermn: rank 1 on {HOST} ended before create_communicator" in message
    assert message.count("Ending the whole job.") == 1


def test_guard_that_can_open_no_more_files(start_job: Any, watch: Watch, said: Said) -> None:
    job = start_job(3)
    late = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def before_look(connections: dict[int, socket.socket]) -> None:
        late.connect(connections[0].getpeername())
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))

    try:
        watch({0: job.ranks[0]}, 3, 3, before_look=before_look)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        late.close()
    message = said()
    assert f"guards the ranks on {HOST} while they start cannot open" in message
    assert "ulimit -n" in message
    assert message.count("Ending the whole job.") == 1
    wait_for_the_end_of(job.ranks[0])


def test_rank_that_nothing_of_mpi_has_started(watch: Watch, said: Said) -> None:
    with subprocess.Popen(["sleep", "600"]) as alone:
        process = guard.find(alone.pid)
        assert process is not None
        watch({0: process}, 2, 2, limit=9.9)
    assert "Running on this host: ranks unknown of 2" in said()


def test_ranks_that_have_started_need_no_guard(
    start_job: Any, watch: Watch, said: Said, seconds: Seconds
) -> None:
    job = start_job(3)

    def before_look(connections: dict[int, socket.socket]) -> None:
        if seconds.now == 5:
            for connection in connections.values():
                connection.close()

    watch(dict(enumerate(job.ranks)), 3, 3, before_look=before_look)  # otherwise it never returns
    assert said() == ""
    assert all(rank.is_alive() for rank in job.ranks)


def test_rank_is_ended_by_another_before_its_turn(
    start_job: Any,
    watch: Watch,
    said: Said,
    seconds: Seconds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = start_job(3)

    def before_look(connections: dict[int, socket.socket]) -> None:
        if not job.ranks[2].is_alive():
            connections[2].close()

    def sleep(duration: float) -> None:
        seconds.now += duration
        if duration == 0.6:
            job.end(2)

    monkeypatch.setattr(seconds, "sleep", sleep)
    watch({2: job.ranks[2]}, 3, 3, limit=9.9, before_look=before_look)
    assert said() == ""
    assert job.ranks[1].is_alive()


def test_mpiexec_that_is_still_starting_ranks(
    start_job: Any,
    watch: Watch,
    said: Said,
    seconds: Seconds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = start_job(3)
    # One more every 1.5 s, which is just in time.
    monkeypatch.setattr(guard, "all_processes", lambda: job.ranks[: 1 + int(seconds.now // 1.5)])

    def before_look(connections: dict[int, socket.socket]) -> None:
        if seconds.now == 10:
            connections[0].close()

    watch({0: job.ranks[0]}, 3, 3, before_look=before_look)
    assert seconds.now == 10
    assert said() == ""


def test_rank_that_has_been_killed_before_it_could_connect(watch: Watch, seconds: Seconds) -> None:
    watch({}, 2, 2)
    assert seconds.now == 60


def test_other_users_are_not_listened_to(
    start_job: Any, watch: Watch, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(2)
    job.end(1)
    monkeypatch.setattr(guard.os, "getuid", lambda: next(users))
    users = iter([1000, 1001])  # the rank's, then the guard's
    watch({0: job.ranks[0]}, 2, 2)  # it returns at once
    assert said() == ""
    assert job.ranks[0].is_alive()
