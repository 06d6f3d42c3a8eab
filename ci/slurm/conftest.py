"""Fixtures for tests of jobs under Slurm, to be run on the first of its hosts.

``nox -s slurm_tests`` emulates three hosts, starts Debian's Slurm on them and runs the tests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from chainermn.testing.mpiexec import direct_environment, mpi_flavor
from ci.multinode.hosts import EMULATED_HOSTFILE, Hosts
from ci.slurm.jobs import BatchJob

#: Variables that ranks get besides this environment. The PMIx of Debian's Slurm makes its clients
#: ask for modules that Open MPI's wheel lacks; without these variables, it complains.
_QUIET = {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native"}
Script = str | Path


@pytest.fixture(scope="session")
def hosts() -> Hosts:
    """Return the hosts of Slurm."""
    if not EMULATED_HOSTFILE.exists():
        pytest.fail("there are no hosts; start these tests by: nox -s slurm_tests")
    return Hosts(EMULATED_HOSTFILE)


@pytest.fixture(scope="session")
def srun() -> list[str]:
    """Return ``srun`` with the option that the MPI in use needs."""
    return ["srun", {"mpich": "--mpi=pmi2", "openmpi": "--mpi=pmix"}[mpi_flavor()]]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Return the environment in which to submit: with this Python, one thread per rank."""
    return {**direct_environment(), **_QUIET, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """Return the path of an empty folder that all hosts see, unlike pytest's folders."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def submit(
    hosts: Hosts, environment: Mapping[str, str], shared_path: Path
) -> Iterator[Callable[..., BatchJob]]:
    """Return a function that gives ``sbatch`` a script, which is a path or its lines.

    ``submit("srun hostname", "--nodes=3")`` returns the `BatchJob`. No job outlives the test.
    """
    jobs: list[BatchJob] = []

    def start(script: Script, *options: str, arguments: Sequence[str] = ()) -> BatchJob:
        if isinstance(script, str):
            path = shared_path / f"script-{len(jobs)}.sh"
            path.write_text(f"#!/bin/bash\n{script}\n")
            script = path
        jobs.append(BatchJob(hosts, [*options, str(script), *arguments], shared_path, environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel()
