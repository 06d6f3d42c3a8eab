"""Hosts and ranks of a Slurm allocation, according to its variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from chainermn.launch.command import launch
from chainermn.launch.mpiexec import find_mpiexec, mpi_flavor
from chainermn.launch.slurm import allocated_hosts


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an scontrol on PATH that knows only one list of nodes."""
    program = tmp_path / "scontrol"
    program.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames n[1-3],login" ] && printf "n1\\nn2\\nn3\\nlogin\\n"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def allocation(nodes: str, tasks: str = "") -> dict[str, str]:
    return {"SLURM_JOB_NODELIST": nodes} | ({"SLURM_TASKS_PER_NODE": tasks} if tasks else {})


def test_outside_of_slurm() -> None:
    assert allocated_hosts({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("nodes", "tasks", "hosts"),
    [
        ("n1", "4", [("n1", 4)]),
        ("n1,n2", "2(x2)", [("n1", 2), ("n2", 2)]),
        ("n[1-3],login", "2,1(x2),8", [("n1", 2), ("n2", 1), ("n3", 1), ("login", 8)]),
        ("n[1-3],login", "2(x3),1", [("n1", 2), ("n2", 2), ("n3", 2), ("login", 1)]),
        ("n1,n2", "", [("n1", 1), ("n2", 1)]),
    ],
)
def test_inside(scontrol: None, nodes: str, tasks: str, hosts: list[tuple[str, int]]) -> None:
    assert allocated_hosts(allocation(nodes, tasks)) == hosts


@pytest.mark.parametrize(
    ("nodes", "tasks", "message"),
    [
        ("n1,n2", "2", r"=n1,n2 names 2 hosts, .*=2 describes 1, .*; use --host a:2,b:1"),
        ("n1", "many", r"expected SLURM_TASKS_PER_NODE to look like 2\(x3\),1, got 'many'"),
        ("n1", "0", r"expected 1 to 999,999 ranks on a host, got 'n1:0'"),
        ("n1", "1(x99999999999)", r"expected SLURM_TASKS_PER_NODE to look like 2\(x3\),1, got"),
        ("-oProxyCommand=x", "", r"SLURM_JOB_NODELIST, .*: expected a host name made of letters"),
        ("--help[1-2]", "1(x2)", r"expected SLURM_JOB_NODELIST to look like .*, got '--help\["),
        ("n[1-2]\n", "1(x2)", r"expected SLURM_JOB_NODELIST to look like .*, got 'n\[1-2\]\\n'"),
        ("n[1-2]", "1(x2)", r"scontrol show hostnames n\[1-2\]: .*name the hosts with --host"),
    ],
)
def test_too_little_is_known(scontrol: None, nodes: str, tasks: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        allocated_hosts(allocation(nodes, tasks))


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("arguments", "ranks", "hosts"),
    [
        ([], 3, "n1:2,n2:1"),
        (["-n", "2"], 2, "n1:2"),
        (["--host", "n2:4"], 4, "n2:4"),
        (["--host", "n2.example.com:4"], 4, "n2.example.com:4"),
    ],
)
def test_launch_in_an_allocation(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], ranks: int, hosts: str
) -> None:
    for name, value in {"SLURM_JOB_ID": "1", **allocation("n1,n2", "2,1")}.items():
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(launch, [*arguments, "--dry-run", "true"], catch_exceptions=False)
    assert shown.exit_code == 0
    option = {"mpich": "-hosts", "openmpi": "--host"}[mpi_flavor()]
    assert f"{find_mpiexec()} {option} {hosts} " in shown.output
    assert f" -n {ranks} " in shown.output


def test_hosts_outside_of_the_allocation(scontrol: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "1", **allocation("n[1-3],login")}.items():
        monkeypatch.setenv(name, value)
    arguments = ["--host", "n3:1,n4:1,n5:1,localhost:1", "--dry-run", "true"]
    refused = CliRunner().invoke(launch, arguments)
    assert (refused.exit_code, refused.output) == (
        1,
        "Error: n[4-5], localhost: not in this Slurm allocation, which has n[1-3], login; "
        "name only these hosts, or none to use them all\n",
    )
    # No check if MPICH is told to start ranks by ssh, or if the allocation's hosts are unknown.
    for name, value in {"HYDRA_LAUNCHER": "ssh", "SLURM_JOB_NODELIST": "unknown[1-2]"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert CliRunner().invoke(launch, arguments).exit_code == 0


def test_more_ranks_than_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "1", **allocation("n1,n2", "1(x2)")}.items():
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(launch, ["-n", "4", "--dry-run", "true"])
    assert shown.exit_code == 1
    assert "4 ranks do not fit on the hosts n1:1,n2:1" in shown.output
