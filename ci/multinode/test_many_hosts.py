"""Many emulated hosts: exchanges, launching, the doctor.

The tests start these hosts inside the first host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from chainermn.launch.hosts import Host
from ci.cluster import requirements
from ci.cluster.cluster import Cluster
from ci.cluster.hosts import Host as EmulatedHost
from ci.multinode.conftest import skip_unless_emulated
from ci.multinode.hosts import Hosts
from ci.multinode.scripts import many

SCRIPT = Path(__file__).with_name("scripts") / "many.py"
MANY = 16

StartHosts = Callable[[int], Cluster]


@pytest.fixture(scope="module")
def start_hosts() -> Iterator[StartHosts]:
    """Return a function that starts hosts in place of those it started before."""
    if missing := requirements.find_missing():
        pytest.skip(missing)
    with Cluster(f"many-{uuid.uuid4().hex}") as cluster:
        up = 0

        def start(number: int) -> Cluster:
            nonlocal up
            if number != up:
                cluster.up(number, ends_with_this_process=True)
            up = number
            return cluster

        yield start


def chainermn(cluster: Cluster, *arguments: str | Path) -> str:
    """Run a command of this library on the first host; return its output."""
    command = [sys.executable, "-m", "chainermn", *map(str, arguments)]
    ended = subprocess.run(
        cluster.hosts()[0].command("env", "OMP_NUM_THREADS=1", *command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert ended.returncode == 0, f"{ended}"
    return ended.stdout


def places(number: int, ranks: Sequence[int] = (1,), *, reverse: bool = False) -> list[Host]:
    """Return hosts; their numbers of ranks repeat ``ranks``."""
    found = [(f"host{index:02}", ranks[index % len(ranks)]) for index in range(number)]
    return found[::-1] if reverse else found


def test_host_inside_a_host_is_not_ready_because_the_outer_one_is(hosts: Hosts) -> None:
    """A process without mounts of its own sees the files of its host."""
    skip_unless_emulated(hosts)
    assert Path("/run/sshd.pid").exists()
    assert not EmulatedHost("host00", os.getpid()).is_ready()


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(places(MANY, [2]), id="16 x 2"),
        pytest.param(places(6, [1, 2, 3], reverse=True), id="unequal and in another order"),
        pytest.param(places(64), id="64 x 1", marks=pytest.mark.nightly),
    ],
)
def test_communicators(where: list[Host], start_hosts: StartHosts) -> None:
    cluster = start_hosts(max(MANY, len(where)))
    hosts = ",".join(f"{name}:{ranks}" for name, ranks in where)
    report: dict[str, Any] = json.loads(chainermn(cluster, "launch", "--host", hosts, SCRIPT))
    on = [name for name, ranks in where for _ in range(ranks)]
    assert report.pop("hosts") == on
    refused = {"single_node": f"the {len(on)} ranks run on {len(where)};"}
    if len({ranks for _, ranks in where}) > 1:
        refused["two_dimensional"] = f"got {', '.join(str(ranks) for _, ranks in where)}"
    assert list(report) == many.NAMES
    for name, everywhere in report.items():
        if name in refused:
            assert all(refused[name] in str(wrong) for wrong in everywhere), everywhere[0]
        else:
            assert everywhere == [[]] * len(on), name


EXAMINE = """\
import json, sys
from chainermn.doctor.checks import CHECKS
from chainermn.doctor.probe import ask, probe_command
from chainermn.doctor.setup import Setup
from chainermn.launch.mpiexec import launch_environment, mpiexec_command

name, probe, hosts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
setup = Setup(hosts=hosts)
if probe:  # without the others, some of which take long on a slow link
    program = probe_command([probe], 600)
    command = mpiexec_command(len(hosts), program, python=False, hosts=hosts)
    setup.outcomes[probe, "hosts"] = ask(command, [probe], 600, launch_environment(hosts))[probe]
(check,) = (check for check in CHECKS if check.name == name)
print(check.examine(setup).found)
"""


def examine(cluster: Cluster, where: Sequence[Host], name: str, probe: str = "") -> str:
    """Return what a check of the doctor finds, given the answers to a probe."""
    code = [sys.executable, "-c", EXAMINE, name, probe, json.dumps(where)]
    command = cluster.hosts()[0].command(*code)
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_doctor_names_a_slow_host(start_hosts: StartHosts) -> None:
    """Its link takes two seconds for 1 MiB: far more than most, even if the cores are busy."""
    cluster = start_hosts(MANY)
    cluster.set_rate("4mbit", "host07")
    found = examine(cluster, places(MANY), "slow hosts", "speeds")
    cluster.set_rate("off", "host07")
    assert "host07: " in found, found
    assert "1 MiB to another host and back takes" in found.partition("host07: ")[2], found


def test_doctor_names_the_host_that_differs(start_hosts: StartHosts) -> None:
    cluster = start_hosts(MANY)
    version = metadata.version("numpy")
    package = metadata.distribution("numpy").locate_file(f"numpy-{version}.dist-info")
    own = "cd $TMPDIR; echo 'Name: numpy\nVersion: 2.0.0' >METADATA"
    mount = f"mount --bind METADATA '{package}/METADATA'"
    subprocess.run(cluster.host("host03").command("sh", "-ec", f"{own}; {mount}"), check=True)
    found = examine(cluster, places(MANY), "same software")
    assert found == f"numpy: host[00-02,04-15]: {version}; host03: 2.0.0\n"


def test_doctor_names_the_host_with_too_many_ranks(start_hosts: StartHosts) -> None:
    where = [*places(MANY - 1), ("host15", 1000)]
    found = examine(start_hosts(MANY), where, "cores and GPUs")
    assert found.startswith("host15: ranks: 1000, cores: ")


@pytest.mark.nightly
def test_doctor_on_64_hosts(start_hosts: StartHosts) -> None:
    shown = chainermn(start_hosts(64), "doctor", "--hostfile", "/run/hostfile")
    rows = {line[2:28].strip(): line[29:].strip() for line in shown.splitlines()}
    assert rows["ssh without a password"] == "host[00-63]"
    assert rows["a job over the hosts"] == "64 ranks, in the order of the hosts"
    assert len(shown.splitlines()) < 60
