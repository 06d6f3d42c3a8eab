"""Ranks that Slurm starts itself."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ci.slurm.jobs import BatchJob, run

ADD_RANKS = [sys.executable, str(Path(__file__).resolve().parent / "scripts/add_ranks.py")]
#: Four ranks on three hosts, whatever order they print in.
FOUR = [f"rank {rank} of 4 on host {host} sum 10" for rank, host in enumerate([0, 0, 1, 2])]

Submit = Callable[..., BatchJob]


@pytest.mark.parametrize("communicator", ["naive", "hierarchical"])
def test_ranks_on_three_hosts(
    srun: Sequence[str], environment: Mapping[str, str], communicator: str
) -> None:
    shown = run(*srun, "--nodes=3", "--ntasks=4", *ADD_RANKS, communicator, env=environment)
    assert sorted(shown.splitlines()) == FOUR


def test_step_of_a_batch_job(submit: Submit, srun: Sequence[str]) -> None:
    job = submit(shlex.join([*srun, *ADD_RANKS]), "--nodes=3", "--ntasks=4")
    job.wait()
    assert sorted(job.output().splitlines()) == FOUR
