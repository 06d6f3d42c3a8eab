"""How a job is ended, with stand-ins for MPI and for the processes to kill."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chainermn.failures import ending
from chainermn.failures.ending import end_job, print_at_once, start_reaper
from chainermn.process import processes
from libs.chainermn.tests.process.stand_in_job import wait_for_the_end_of


class Ended(BaseException):
    """A stand-in for the death of this process."""


class StandInMpi:
    def __init__(self, log: list[str], is_initialized: bool, is_finalized: bool) -> None:
        self.Is_initialized = lambda: is_initialized
        self.Is_finalized = lambda: is_finalized
        self.COMM_WORLD = SimpleNamespace(Abort=lambda code: log.append(f"Abort({code})"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make `end_job` only note what it would do to this process; return the notes."""
    notes: list[str] = []

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        notes.append("kill")
        raise Ended

    importlib.reload(ending)  # it remembers that the job is ending
    monkeypatch.setattr(ending, "start_reaper", lambda pid: notes.append("start_reaper"))
    monkeypatch.setattr(ending, "print_at_once", lambda message: notes.append(message))
    monkeypatch.setattr(ending.time, "sleep", lambda seconds: notes.append(f"sleep({seconds})"))
    monkeypatch.setattr(ending.os, "kill", kill)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", StandInMpi(notes, True, False))
    return notes


def test_order_in_which_a_job_is_ended(log: list[str], launcher: Callable[[], str | None]) -> None:
    with pytest.raises(Ended):
        end_job("why", after=2.0, announce=lambda: not log.append("announce"), lost="b")
    assert log == [
        *("announce", "start_reaper", "sleep(2.0)", "why", "sleep(0.3)", "Abort(1)", "kill")
    ]
    assert launcher() == "b"


def test_rank_leaves_the_message_and_the_end_to_another_one(
    log: list[str], launcher: Callable[[], str | None]
) -> None:
    with pytest.raises(Ended):
        end_job("why", after=0.5, announce=lambda: False)
    assert log == ["start_reaper", f"sleep({ending.SECONDS_FOR_THE_FIRST})", "Abort(1)", "kill"]
    assert launcher() is None


@pytest.mark.parametrize(
    "mpi",
    [None, StandInMpi([], False, False), StandInMpi([], True, True)],
    ids=["not imported", "not initialized", "finalized"],
)
def test_without_mpi(mpi: Any, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    if mpi:
        monkeypatch.setattr(mpi.COMM_WORLD, "Abort", lambda code: pytest.fail("not allowed now"))
    with pytest.raises(Ended):
        end_job("")
    assert log[-1] == "kill"


def test_whatever_announcing_does(log: list[str]) -> None:
    def announce() -> None:
        raise MemoryError

    with pytest.raises(Ended):
        end_job("why", announce=announce)
    assert log[-3:] == ["sleep(0.3)", "Abort(1)", "kill"]


def test_second_thread_prints_and_leaves_the_end_to_the_first(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        log.append(f"sleep({seconds})")
        if seconds == 60:
            raise Ended  # meanwhile, the first thread would end the process

    monkeypatch.setattr(ending.time, "sleep", sleep)
    with pytest.raises(Ended):
        end_job("", announce=lambda: not log.append("first"))
    log.clear()
    with pytest.raises(Ended):
        end_job("what I saw", announce=lambda: not log.append("second"))
    assert log == ["second", "sleep(0.0)", "what I saw", "sleep(0.3)", "sleep(60)"]


# ---- standard error ----


@contextlib.contextmanager
def piped() -> Iterator[int]:
    """Replace standard error with a pipe, and yield its reading end."""
    # Not a fixture, because pytest redirects standard error again before a test begins.
    before = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield reader
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(reader)


def test_message_larger_than_a_pipe() -> None:
    message = "a long line\n" * 20_000
    with piped() as reader:
        thread = threading.Thread(target=print_at_once, args=[message], daemon=True)
        thread.start()
        read = b""
        while len(read) < len(message):
            read += os.read(reader, 1 << 16)
        thread.join()
    assert read.decode() == message


def test_waits_until_the_message_has_been_read(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        is_unread = select.select([reader], [], [], 0)[0]
        log.append(os.read(reader, 5).decode() if is_unread else f"sleep({seconds})")

    with piped() as reader:
        monkeypatch.setattr(ending, "print_at_once", print_at_once)
        monkeypatch.setattr(ending.time, "sleep", sleep)
        with pytest.raises(Ended):
            end_job("unread \ud800")
    assert log[1:] == ["sleep(0.0)", "unrea", "d ?\n", "sleep(0.3)", "Abort(1)", "kill"]


def test_message_that_nobody_reads(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(ending, "print_at_once", print_at_once)
    monkeypatch.setattr(ending.time, "monotonic", lambda: sum(seconds))
    monkeypatch.setattr(ending.time, "sleep", seconds.append)
    with piped() as reader:
        with pytest.raises(Ended):
            end_job("unread")
        assert os.read(reader, 100) == b"unread\n"
    assert sum(seconds) == pytest.approx(1.2 + 0.3, abs=0.02)


def test_standard_error_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, text: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(ending.os, "write", refuse)
    monkeypatch.setattr(sys, "stdout", None)
    print_at_once("nobody will know")


def test_rank_without_standard_error_writes_into_no_file(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "__stderr__", None)  # a file of data may have its number
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    print_at_once("for the log of a daemon")
    assert (capfd.readouterr().err, log.getvalue()) == ("", "for the log of a daemon\n")


# ---- the reaper ----


def reap(process: Any) -> None:
    """Start a reaper for a process, and wait for its end."""
    start_reaper(process.pid, after=0).wait(60)


def test_all_of_the_job_are_killed(start_job: Any) -> None:
    job, other = start_job(3), start_job(1, "hydra_pmi_proxy")
    reap(job.ranks[1])
    wait_for_the_end_of(*job.ranks, job.launcher)
    assert [process.is_alive() for process in (*other.ranks, other.launcher)] == [True, True]


def test_without_a_launcher_only_the_process_is_killed(start_job: Any) -> None:
    job = start_job(2, "not_of_mpi")
    reap(job.ranks[0])
    wait_for_the_end_of(job.ranks[0])
    assert [process.is_alive() for process in (job.ranks[1], job.launcher)] == [True, True]


def test_process_whose_number_belongs_to_another_by_now_is_spared(
    start_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(2)
    reused = dataclasses.replace(job.ranks[1], started=job.ranks[1].started + "0")
    monkeypatch.setattr(ending, "family_of", lambda pid: [job.ranks[0], reused])
    monkeypatch.setattr(ending, "launchers_of", lambda pid: [])
    reap(job.ranks[0])
    wait_for_the_end_of(job.ranks[0])
    assert job.ranks[1].is_alive()


def test_reaper_has_nothing_left_to_do(start_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start_job(1)
    job.end(0)
    monkeypatch.setattr(ending, "family_of", lambda pid: job.ranks)
    start_reaper(job.ranks[0].pid, after=3600).wait(60)


# Maps files into its memory.
MAPS = """
import mmap, os, sys
maps = [mmap.mmap(os.open(name, os.O_RDWR | os.O_CREAT), 0) for name in sys.argv[1:]]
print(flush=True)
sys.stdin.read()
"""


def test_shared_memory_of_mpi_is_removed() -> None:
    name = uuid.uuid4().hex
    of_mpi = [Path("/dev/shm", begin + name) for begin in ("mpich_shm_", "sm_segment.host.")]
    of_user = Path("/dev/shm", name)
    for path in (*of_mpi, of_user):
        path.write_bytes(b"used")
    command = [sys.executable, "-c", MAPS, *of_mpi, of_user]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        reap(rank)
    assert [path.exists() for path in (*of_mpi, of_user)] == [False, False, True]
    of_user.unlink()


def test_no_reaper_where_processes_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "find", lambda pid: None)
    assert start_reaper(os.getpid()) is None
