"""How ranks find their host's guard, and what it keeps open for them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chainermn.connections.channel import Channel
from chainermn.connections.joining import LOOPBACK, Endpoint
from chainermn.failures import guard, guarded
from chainermn.failures.guarded import hold_files, release_files
from chainermn.failures.settings import WatchSettings
from chainermn.failures.watch import Watch
from chainermn.process.processes import Process
from chainermn.testing.mpiexec import run_job
from libs.chainermn.tests.failures.conftest import select_with

TIMEOUT = 60.0

COUNT = """
import json, os
from chainermn import failures
from chainermn.process.processes import family_of, launchers_of
from chainermn.transport.host.mpi import world

def helpers():
    family = family_of(launchers_of(os.getpid())[-1].pid)
    return [process for process in family if process.parent in ranks]

with failures.starting():
    comm = world()
    ranks = comm.allgather(os.getpid())
    n_while_starting = len(helpers())
    failures.join(comm)
while comm.rank == 0 and len(helpers()) > 1:
    pass
if comm.rank == 0:
    print(json.dumps([n_while_starting, [process.name for process in helpers()]]))
"""


@pytest.mark.each_mpi
def test_one_process_per_host_however_many_ranks(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    result = run_job(4, [script])
    assert result.returncode == 0, result
    assert result.left_behind == []
    assert json.loads(result.stdout) == [1, ["chainermn-monit"]]


# ---- which rank starts the guard ----


class Guards:
    """Stand-ins for guard processes: listeners that nobody reads from."""

    def __init__(self) -> None:
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.listeners: list[socket.socket] = []

    def start(self, module: str, arguments: dict[str, Any], files: list[int]) -> SimpleNamespace:
        self.started.append((module, arguments))
        self.listeners.append(socket.socket(fileno=os.dup(files[0])))
        return SimpleNamespace(poll=lambda: None)

    def end(self) -> None:
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guards]:
    started = Guards()
    # The random start time makes this job unique.
    launcher = Process(os.getpid(), "mpiexec", 1, os.urandom(8).hex())
    for name, value in (("PMI_RANK", "2"), ("PMI_SIZE", "6"), ("MPI_LOCALNRANKS", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CHAINERMN_STALL_LIMIT", "2.5")
    monkeypatch.setattr(guarded, "launchers_of", lambda pid: [launcher])
    monkeypatch.setattr(guarded, "start_helper", started.start)
    yield started
    started.end()


def test_ranks_that_come_at_once_share_a_guard(guards: Guards) -> None:
    together, connected = threading.Barrier(8), []

    def connect() -> None:
        together.wait(TIMEOUT)
        with guarded.guarded(2):
            connected.append(True)

    threads = [threading.Thread(target=connect) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert connected == [True] * 8
    ((module, arguments),) = guards.started
    assert module == "chainermn.failures.guard"
    assert (arguments["numbers"], arguments["limit"]) == ((2, 6, 3), 2.5)


def test_rank_that_comes_after_the_end_of_the_guard_starts_another(guards: Guards) -> None:
    for _ in range(2):
        with guarded.guarded(2):
            guards.end()  # not missed by those who are there
    assert len(guards.started) == 2


def test_rank_that_never_ends_starting_the_guard(
    guards: Guards, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(guarded.time, "sleep", pauses.append)
    real = socket.socket.listen
    monkeypatch.setattr(guarded.socket.socket, "listen", lambda *_: connect_others())

    def connect_others() -> None:
        monkeypatch.setattr(guarded.socket.socket, "listen", real)
        with pytest.raises(OSError) as raised, guarded.guarded(2):
            pass
        assert raised.value.errno == errno.ETIMEDOUT
        raise MemoryError

    with pytest.raises(MemoryError), guarded.guarded(2):
        pass
    assert sum(pauses) == pytest.approx(10)


@pytest.fixture
def name(guards: Guards) -> str:
    """Return the name of a guard that has ended, without the zero byte at its beginning."""
    with guarded.guarded(2):
        (listener,) = guards.listeners
        found: bytes = listener.getsockname()
        guards.end()
    guards.started.clear()
    return found[1:].decode()


# Listens under a name as another user. Prints when it is ready, then what it receives.
OTHER_USER = """
import os, socket, sys
launcher, name, backlog = sys.argv[1:]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    open(f"/proc/{launcher}/auxv").close()
except PermissionError:
    print("cannot guess", flush=True)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind("\\0" + name)
    listener.listen(int(backlog))
    print("listens", flush=True)
    if int(backlog):
        print(listener.accept()[0].recv(64), flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_has_the_name_of_the_guard(guards: Guards, name: str) -> None:
    command = [sys.executable, "-c", OTHER_USER, str(os.getpid()), name, "9"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"cannot guess\n"
        assert stranger.stdout.readline() == b"listens\n"
        with pytest.raises(OSError, match="user 65534 has taken the name"), guarded.guarded(2):
            pass
        assert stranger.stdout.readline() == b"b''\n"  # nothing has been sent
        stranger.communicate()
    assert guards.started == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_has_the_name_and_accepts_nobody(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "SECONDS_TO_CONNECT", struct.pack("ll", 0, 100_000))
    command = [sys.executable, "-c", OTHER_USER, str(os.getpid()), name, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        while stranger.stdout.readline() != b"listens\n":
            pass
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect(f"\0{name}")  # fills the queue
            with pytest.raises(BlockingIOError), guarded.guarded(2):
                pass
        stranger.communicate()


# ---- what keeps the files of a rank open ----


@pytest.fixture
def holding(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Run a guard in a thread to hold this process's files.

    Returns an event that is set once the guard keeps a dead rank's files open.
    """
    holds, may_end = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        assert seconds == guard.SECONDS_HELD
        holds.set()
        assert may_end.wait(TIMEOUT)

    def start(module: str, arguments: dict[str, Any], files: list[int]) -> SimpleNamespace:
        process = guards.start(module, arguments, files)
        running = guard.Guard(guards.listeners[-1], guard.Numbers(2, 6, 3), 0.0)
        threads.append(threading.Thread(target=running.run))
        threads[-1].start()
        return process

    threads: list[threading.Thread] = []
    selector = selectors.DefaultSelector()
    select_with(selector, guard, monkeypatch)
    monkeypatch.setattr(guard, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(guarded, "start_helper", start)
    yield holds
    may_end.set()
    for thread in threads:
        thread.join(TIMEOUT)
    for key in selector.get_map().values():
        key.fileobj.close()


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, FileIO]]:
    """Return both ends of a stand-in for the connection to MPICH's process manager."""
    reader, number = os.pipe()
    monkeypatch.setenv("PMI_FD", str(number))
    with FileIO(number, "w") as writer:
        yield reader, writer
    pipe = os.readlink(f"/proc/self/fd/{reader}")
    for each in os.listdir("/proc/self/fd"):  # the guard may still hold one
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{each}") == pipe:
                os.close(int(each))


def is_open(reader: int) -> bool:
    """Tell whether anybody still holds the other end."""
    return select.select([reader], [], [], 0) == ([], [], [])


def test_files_are_released_by_a_rank_that_ends(
    holding: threading.Event, file: tuple[int, FileIO]
) -> None:
    reader, writer = file
    connection = hold_files()
    assert connection is not None
    writer.close()
    assert is_open(reader)
    release_files(connection)
    assert not is_open(reader)
    assert not holding.is_set()


def test_files_stay_open_when_a_rank_is_gone(
    holding: threading.Event, file: tuple[int, FileIO]
) -> None:
    reader, writer = file
    connection = hold_files()
    assert connection is not None
    writer.close()
    connection.close()
    assert holding.wait(TIMEOUT)
    assert is_open(reader)


def test_files_stay_open_when_a_rank_is_gone_whose_child_lives(
    holding: threading.Event, file: tuple[int, FileIO]
) -> None:
    reader, writer = file
    settings = WatchSettings("there", Endpoint([], ""), "0-5", 6, limit=0.0, period=1.0)
    with (
        socket.create_server((LOOPBACK, 0)) as listening,
        socket.create_connection(listening.getsockname()) as connection,
    ):
        watched = Watch(settings, 2, Channel(connection))
        watched.held = hold_files()
        assert watched.held is not None
        child = os.fork()
        if child == 0:
            watched.close_in_child()
            writer.close()
            signal.pause()
        writer.close()
        watched.close_in_child()  # as the end of this process would
    was_noticed = holding.wait(TIMEOUT)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert was_noticed
    assert is_open(reader)


@pytest.mark.parametrize(("pmi_fd", "local_size"), [("open", "6"), ("closed", "3"), ("none", "3")])
def test_no_files_are_held_on_one_host_or_without_mpich(
    pmi_fd: str,
    local_size: str,
    guards: Guards,
    file: tuple[int, FileIO],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MPI_LOCALNRANKS", local_size)
    if pmi_fd == "closed":
        file[1].close()
    elif pmi_fd == "none":
        monkeypatch.setenv("PMI_FD", "none")
    assert hold_files() is None
    assert guards.started == []


def test_no_files_are_held_where_no_guard_can_be_had(
    guards: Guards, file: tuple[int, FileIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(guarded, "start_helper", refuse)
    assert hold_files() is None
