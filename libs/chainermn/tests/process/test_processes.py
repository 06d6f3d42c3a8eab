"""The processes of a host, tested with real ones on Linux."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from chainermn.process import processes
from chainermn.process.processes import (
    Process,
    all_processes,
    environment_of,
    family_of,
    find,
    launchers_of,
)


def test_same_as_psutil_says() -> None:
    me = find(os.getpid())
    assert me is not None
    assert (me.pid, me.parent) == (os.getpid(), os.getppid())
    assert me.name == psutil.Process().name()[:15]
    assert me in all_processes()
    assert me.is_alive()


def test_process_that_has_ended_is_none() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        process = find(child.pid)
        assert process is not None
        process.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert find(child.pid) is None  # dead, though its number is still taken
        assert not process.is_alive()
    assert find(child.pid) is None
    process.kill()


def test_later_process_of_the_same_number_is_spared() -> None:
    me = find(os.getpid())
    assert me is not None
    earlier = Process(me.pid, me.name, me.parent, "0")
    assert not earlier.is_alive()
    earlier.kill()


def test_process_that_ends_while_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    process = Process(child.pid, "true", os.getpid(), "0")
    monkeypatch.setattr(processes, "find", lambda pid: process)
    process.kill()


def test_family_and_launchers(start_job: Any) -> None:
    job = start_job(3)
    assert launchers_of(job.ranks[0].pid) == [job.launcher]
    assert launchers_of(job.launcher.pid) == []
    family = family_of(job.launcher.pid)
    assert family[0] == job.launcher
    assert sorted(process.pid for process in family[1:]) == sorted(r.pid for r in job.ranks)
    assert family_of(job.ranks[0].pid) == [job.ranks[0]]


def test_launchers_are_those_of_this_job(tmp_path: Path) -> None:
    # A job inside another job's script, with a shell between its rank and its daemon.
    chain = [tmp_path / name for name in ("prterun", "batch", "mpiexec", "hydra_proxy", "wrapper")]
    for script in chain:
        script.write_text('#!/bin/sh\n"$@"\nexit\n')
        script.chmod(0o755)
    with subprocess.Popen([*chain, "sleep", "600"]) as outermost:
        while len(family := family_of(outermost.pid)) < 6 or family[-1].name != "sleep":
            time.sleep(0.01)
        found = launchers_of(family[-1].pid)
        for process in family:
            process.kill()
    assert [(launcher.name, launcher.pid) for launcher in found] == [
        ("hydra_proxy", family[3].pid),
        ("mpiexec", family[2].pid),
    ]


def test_environment_of_another_process() -> None:
    given = {"ONE": "1", "WITH": "a=b", "EMPTY": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["cat"], env=given, bufsize=0, **pipes) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"a")
        child.stdout.read(1)  # by now it has its environment, which comes after its start
        assert environment_of(child.pid) == given
    assert environment_of(child.pid) == {}


def test_nothing_is_there_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: object, *_: object, **__: object) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", missing)
    monkeypatch.setattr(Path, "read_text", missing)
    assert all_processes() == []
    assert family_of(os.getpid()) == []
    assert launchers_of(os.getpid()) == []
    assert find(os.getpid()) is None
    assert environment_of(os.getpid()) == {}
