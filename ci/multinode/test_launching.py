"""Commands that people type to start ranks on several hosts, also if a host is missing.

They name the interpreter by its whole path, because a shell opened by ssh does not have the
``PATH`` of the shell that called ``mpiexec``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chainermn.testing.mpiexec import find_mpiexec, mpi_flavor
from ci.cluster import files
from ci.multinode.hosts import Hosts
from ci.multinode.jobs import Job, output_of

SCRIPTS = Path(__file__).resolve().parent / "scripts"
MPIEXEC = str(find_mpiexec())
PRINT_VARIABLE = [sys.executable, str(SCRIPTS / "print_variable.py")]
EXCHANGE = [sys.executable, str(SCRIPTS / "exchange.py")]

Start = Callable[..., Job]


def printed_by(job: Job) -> Any:
    return json.loads(output_of(job.wait()))


def test_list_of_hosts(start_command: Start, hosts: Hosts) -> None:
    names = hosts.names[:2]
    job = start_command([MPIEXEC, "-n", "2", "-host", ",".join(names), *PRINT_VARIABLE, "NONE"])
    assert [host for host, _ in printed_by(job)] == names


def test_hostfile(start_command: Start, hosts: Hosts, tmp_path: Path) -> None:
    first, second = hosts.names[:2]
    lines = {
        "mpich": f"{first}:2\n{second}:1\n",
        "openmpi": f"{first} slots=2\n{second} slots=1\n",
    }
    file = tmp_path / "hostfile"
    file.write_text(lines[mpi_flavor()])
    job = start_command([MPIEXEC, "-n", "3", "-hostfile", str(file), *PRINT_VARIABLE, "NONE"])
    assert [host for host, _ in printed_by(job)] == [first, first, second]


@pytest.mark.parametrize("variable", ["COLOR", "OMPI_COLOR"])
@pytest.mark.parametrize("named", [True, False], ids=["-x", "plain"])
def test_variables(start_command: Start, hosts: Hosts, variable: str, named: bool) -> None:
    """MPICH forwards all variables, Open MPI those that ``-x`` names and those like OMPI_*."""
    if named and mpi_flavor() == "mpich":
        pytest.skip("MPICH has no option -x, and needs none")
    option = ["-x", variable] if named else []
    command = [MPIEXEC, "-n", "2", *option, "-host", ",".join(hosts.names[:2]), *PRINT_VARIABLE]
    job = start_command([*command, variable], env={variable: "green"})
    forwarded = named or mpi_flavor() == "mpich" or variable.startswith("OMPI_")
    expected = ["green", "green" if forwarded else None]
    assert printed_by(job) == [list(pair) for pair in zip(hosts.names, expected, strict=False)]


@pytest.fixture
def silent_host(request: pytest.FixtureRequest, hosts: Hosts) -> str:
    """Return a host that does not answer."""
    if not hosts.emulated:
        return "192.0.2.1"  # reserved for documentation, so nobody has it
    set_link = request.getfixturevalue("set_link")
    set_link(hosts.names[-1], "down")
    return hosts.names[-1]


def test_host_that_does_not_answer(
    start_command: Callable[..., Job], hosts: Hosts, silent_host: str
) -> None:
    where = f"{hosts.names[0]},{silent_host}"
    job = start_command([MPIEXEC, "-n", "2", "-host", where, *PRINT_VARIABLE, "NONE"])
    assert job.process.wait(timeout=120) != 0
    assert silent_host in job.output()[1]


def test_script_that_one_host_lacks(start_command: Start, hosts: Hosts, local_path: Path) -> None:
    first, second = hosts.names[:2]
    script = local_path / "train.py"
    script.write_text("")
    where = ["--host", f"{first}:1,{second}:1"]
    job = start_command([sys.executable, "-m", "chainermn", "launch", *where, str(script)]).wait()
    assert job.returncode == 1
    assert f"Error: {second}: it has no {script}. To find out more, run: " in job.stderr


def test_interface_with_the_same_address_on_all_hosts(
    start_command: Start, hosts: Hosts, duplicate_interface: None
) -> None:
    """Open MPI needs to know which network leads to the other hosts; MPICH finds out."""
    env = {"OMPI_MCA_btl_tcp_if_include": f"{files.NETWORK}.0/24", "OMP_NUM_THREADS": "1"}
    where = ",".join(f"{name}:2" for name in hosts.names[:2])
    job = start_command([MPIEXEC, "-n", "4", "-host", where, *EXCHANGE, "hierarchical"], env=env)
    everywhere = printed_by(job)["hierarchical"]
    assert [got["collectives"]["allreduce"] for got in everywhere] == [[60, 64, 68]] * 4
