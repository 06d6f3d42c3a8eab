"""Memory that ranks share: it has no name, and nobody else gets it, whatever happens."""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from chainermn.transport.host.memory import share_memory

WORLD = MPI.COMM_WORLD
TWO_PROCESSES = Path(__file__).with_name("two_processes.py")
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


def run_two(function: str, *arguments: object) -> Any:
    shown = subprocess.run(
        [sys.executable, TWO_PROCESSES, function, json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    return json.loads(shown.stdout)


@pytest.mark.each_mpi
@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("is_old", [False, True], ids=["memfd", "Python of an older system"])
def test_all_see_what_one_writes(monkeypatch: pytest.MonkeyPatch, is_old: bool) -> None:
    handed_out = []

    def send_fds(connection: socket.socket, buffers: Any, descriptors: list[int]) -> None:
        handed_out.append(os.fstat(descriptors[0]))
        really(connection, buffers, descriptors)

    really = socket.send_fds
    monkeypatch.setattr(socket, "send_fds", send_fds)
    if is_old:
        monkeypatch.delattr(os, "memfd_create")
    shared = share_memory(WORLD, 12345 if WORLD.rank == 0 else 7)
    assert isinstance(shared, mmap.mmap), shared
    assert shared[:] == bytes(12345)
    WORLD.Barrier()
    shared[WORLD.rank] = 100 + WORLD.rank
    WORLD.Barrier()
    assert [*shared[: WORLD.size]] == [100 + rank for rank in range(WORLD.size)]
    assert len(handed_out) == (WORLD.size - 1 if WORLD.rank == 0 else 0)
    for found in handed_out:
        assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)


@pytest.mark.parametrize("is_old", [False, True], ids=["memfd", "Python of an older system"])
def test_nothing_is_left_of_ranks_killed_at_any_line(is_old: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        outcome = run_two("kill_everywhere", folder, is_old)
    assert outcome["left"] == []
    # Each rank was killed at every line up to the end of share_memory.
    assert min(outcome["lines"]) > 15


@needs_root
@pytest.mark.parametrize(
    "namespaces", [["pid"], ["ipc"], ["user"], ["user", "pid", "ipc"]], ids="-".join
)
def test_ranks_in_containers_of_one_network_share_it(namespaces: list[str]) -> None:
    got = run_two("share_apart", namespaces, NOBODY if "user" in namespaces else 0)
    if "unshare: Operation not permitted" in got:
        pytest.skip("users may not have namespaces of their own here")
    assert got == ["[7, 8, 0]"] * 2


@needs_root
def test_ranks_in_containers_of_two_networks_do_not() -> None:
    assert run_two("share_apart", ["net"], 0) == [
        "[7, 0, 0]",
        f"[Errno {errno.ECONNREFUSED}] {os.strerror(errno.ECONNREFUSED)}",
    ]


# Looks for the memory that ranks share, as anyone who runs programs on their host may.
INTRUDER = """\
import json, os, socket, sys
user, crowd, *pids = json.loads(sys.argv[1])
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
lines = open("/proc/net/unix").read().splitlines()
addresses = {line.split()[-1] for line in lines if "@chainermn-" in line}
asking = []
for address in addresses:
    for shown in [b"", bytes(31), bytes(32), bytes(33)] + [b""] * crowd:
        asking.append(socket.socket(socket.AF_UNIX))
        asking[-1].setblocking(False)
        try:
            asking[-1].connect("\\0" + address[1:])
            asking[-1].sendall(shown)
        except OSError:  # it is full, or of another job, which is over by now
            pass
opened = []
for pid in pids if user else []:
    paths = [f"/proc/{pid}/mem", *(f"/proc/{pid}/fd/{number}" for number in range(64))]
    if os.path.exists(f"/proc/{pid}/map_files"):
        try:
            names = os.listdir(f"/proc/{pid}/map_files")
        except PermissionError:
            names = []
        paths += [f"/proc/{pid}/map_files/{name}" for name in names]
    for path in paths:
        try:
            os.open(path, os.O_RDWR)
            opened.append(path)
        except OSError:
            pass
print(json.dumps([len(asking), opened]), flush=True)
sys.stdin.read()
received = []
for each in asking:
    try:
        received += socket.recv_fds(each, 1, 4)[1]
    except OSError:
        pass
print(json.dumps(received))
"""


class Entered:
    """The ranks' communicator, which lets in an intruder before one of rank 0's calls."""

    rank, size = WORLD.rank, WORLD.size

    def __init__(self, enter: Callable[[], None], before: str) -> None:
        self._enter, self._before = enter, before

    def _reach(self, point: str) -> None:
        if self.rank == 0 and point == self._before:
            self._enter()
            self._before = ""

    def bcast(self, value: Any) -> Any:
        self._reach("bcast")
        return WORLD.bcast(value)

    def Barrier(self) -> None:
        self._reach("Barrier")
        WORLD.Barrier()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("before", ["bcast", "Barrier"])
@pytest.mark.parametrize("user", [0, pytest.param(NOBODY, marks=needs_root)])
def test_nobody_else_gets_it(user: int, before: str) -> None:
    intruders = []
    pids = WORLD.allgather(os.getpid())

    def enter() -> None:
        intruders.append(intrude(user, 0, *pids))

    shared = share_memory(Entered(enter, before), 1000)
    assert isinstance(shared, mmap.mmap), shared
    for intruder, asked, opened in intruders:
        received, _ = intruder.communicate()
        assert (json.loads(received), opened) == ([], [])
        assert asked >= 4
    assert len(intruders) == (WORLD.rank == 0)


@pytest.mark.mpi(2)
def test_crowd_at_the_door_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    intruders: list[Any] = []
    monkeypatch.setattr(socket, "SOMAXCONN", 10)
    shared = share_memory(Entered(lambda: intruders.append(intrude(0, 50)), "bcast"), 1000)
    if WORLD.rank == 0:
        assert isinstance(shared, mmap.mmap)
        intruders[0][0].communicate()
    else:
        assert shared == f"[Errno {errno.EAGAIN}] {os.strerror(errno.EAGAIN)}"


@pytest.mark.mpi(2)
def test_crowd_that_keeps_coming_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    intruders: list[Any] = []
    crowd: list[socket.socket] = []
    really_accept = socket.socket.accept

    def accept(door: socket.socket) -> Any:
        assert len(crowd) < 1000
        accepted = really_accept(door)
        crowd.append(socket.socket(socket.AF_UNIX))
        crowd[-1].setblocking(False)
        crowd[-1].connect(door.getsockname())
        return accepted

    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(socket, "SOMAXCONN", 10)
    shared = share_memory(Entered(lambda: intruders.append(intrude(0, 50)), "bcast"), 1000)
    for stranger in crowd:
        stranger.close()
    if WORLD.rank == 0:
        assert isinstance(shared, mmap.mmap), shared
        assert len(crowd) == 11
        intruders[0][0].communicate()
    else:
        assert shared == f"[Errno {errno.EAGAIN}] {os.strerror(errno.EAGAIN)}"


def intrude(user: int, crowd: int, *pids: int) -> tuple[subprocess.Popen[str], int, list[str]]:
    """Start an intruder; return it, how often it asked, and what it could open."""
    intruder = subprocess.Popen(
        [sys.executable, "-c", INTRUDER, json.dumps([user, crowd, *pids])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert intruder.stdout is not None
    asked, opened = json.loads(intruder.stdout.readline())
    return intruder, asked, opened
