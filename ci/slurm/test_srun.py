"""Ranks that Slurm starts itself."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from chainermn.testing.mpiexec import mpi_flavor
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


def test_mpi_none_is_an_error(environment: Mapping[str, str]) -> None:
    command = ["srun", "--mpi=none", "--nodes=3", *ADD_RANKS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    language = {"mpich": "pmi2", "openmpi": "pmix"}[mpi_flavor()]
    assert ended.stderr.count("RuntimeError: srun started 3 processes, but each of them is") == 3
    assert f"Start the job with srun --mpi={language}, or " in ended.stderr


def test_one_rank_in_a_batch_script(submit: Submit) -> None:
    """The script is not a task of srun, so it runs alone on purpose."""
    job = submit(shlex.join(ADD_RANKS), "--nodes=3", "--ntasks=4")
    job.wait()
    assert job.output() == "rank 0 of 1 on host 0 sum 1\n"
