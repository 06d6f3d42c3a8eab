"""Processes that stand in for a job."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chainermn.process.processes import Process, environment_of, family_of, find

# Prints the process ID of each rank, one per line.
LAUNCHER = """#!/bin/sh
for rank in $*
do
    export PMI_RANK=$rank PMI_SIZE=$# OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$#
    sleep 600 >/dev/null &
    echo $!
done
wait
"""


class Job:
    """A script in place of mpiexec, with ranks that only sleep."""

    def __init__(self, launcher: Path, n_ranks: int) -> None:
        launcher.write_text(LAUNCHER)
        launcher.chmod(0o755)
        self.process = subprocess.Popen(
            [launcher, *map(str, range(n_ranks))], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        pids = [int(self.process.stdout.readline()) for _ in range(n_ranks)]
        self.launcher = named(launcher.name, self.process.pid)
        self.ranks = [named("sleep", pid) for pid in pids]

    def end(self, rank: int) -> None:
        """Kill a rank, and wait until it is gone."""
        self.ranks[rank].kill()
        wait_for_the_end_of(self.ranks[rank])

    def close(self) -> None:
        for process in reversed(family_of(self.process.pid)):
            process.kill()
        self.process.communicate()


def wait_for_the_end_of(*processes: Process) -> None:
    """Wait until killed processes are dead."""
    for process in processes:
        while process.is_alive():
            os.sched_yield()


def named(name: str, pid: int) -> Process:
    """Wait until a process runs its program, which gives it this name; return the process.

    The kernel changes the name first. For a moment, there is no environment.
    """
    while (process := find(pid)) and not (process.name == name and environment_of(pid)):
        time.sleep(0.01)
    assert process is not None
    return process


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that starts a job, given its number of ranks and a name for mpiexec."""
    started: list[Job] = []

    def start(n_ranks: int = 2, name: str = "mpiexec") -> Job:
        started.append(Job(tmp_path / name, n_ranks))
        return started[-1]

    yield start
    for job in started:
        job.close()
