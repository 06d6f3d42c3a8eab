"""Fixtures for tests on several hosts; pytest runs on the first host.

``nox -s multinode_tests`` emulates four hosts and runs the tests on the first. With
``-- --hostfile FILE`` it runs them on the machines in the file, of which the first must be this
one. All need this checkout and its environment at the same path, and ssh between them without a
password.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from chainermn.launch.hosts import is_this_host
from chainermn.testing.mpiexec import JOB_VARIABLE, mpiexec_command
from ci.cluster import links
from ci.multinode.hosts import EMULATED_HOSTFILE, Hosts
from ci.multinode.jobs import Job

Arguments = Sequence[str | os.PathLike[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--hostfile``."""
    parser.addoption(
        "--hostfile",
        type=Path,
        default=EMULATED_HOSTFILE,
        metavar="FILE",
        help="real machines to test on, one per line; the first must be this one",
    )


@pytest.fixture(scope="session")
def hosts(pytestconfig: pytest.Config) -> Hosts:
    """Return the hosts: ``hosts.names``, ``hosts.emulated``, ``hosts.run(name, command)``."""
    hostfile = pytestconfig.getoption("--hostfile", EMULATED_HOSTFILE)
    if not hostfile.exists():
        how = "write one host per line, this one first"
        if hostfile == EMULATED_HOSTFILE:
            how = "start these tests by: nox -s multinode_tests"
        pytest.fail(f"there is no {hostfile}; {how}")
    hosts = Hosts(hostfile)
    if len(hosts.names) < 2 or not is_this_host(hosts.names[0]):
        here = socket.gethostname()
        pytest.fail(f"{hostfile}: expected {here}, which is here, and others, got {hosts.names}")
    return hosts


@pytest.fixture(scope="session")
def _jobs() -> list[Job]:
    """Return the jobs that tests have started."""
    return []


@pytest.fixture(autouse=True)
def leaves_no_process(_jobs: list[Job]) -> Iterator[None]:
    """Fail a test whose jobs leave a process behind on any host, and kill that process."""
    yield
    left = []
    while _jobs:
        left += _jobs.pop().kill()
    assert not left, f"the test's jobs left behind: {left}"


@pytest.fixture(scope="session")
def start_command(hosts: Hosts, _jobs: list[Job]) -> Callable[..., Job]:
    """Return a function that starts a command line of ``mpiexec``: see `Job`."""

    def start(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Job:
        _jobs.append(Job(hosts, command, env=env))
        return _jobs[-1]

    return start


@pytest.fixture(scope="session")
def start_job(hosts: Hosts, start_command: Callable[..., Job]) -> Callable[..., Job]:
    """Return a function that starts a script on several hosts.

    ``start_job((2, 1), [script, "argument"], env={"NAME": "value"})`` starts two ranks on the
    first host and one on the second, and gives them the variables under either MPI. The
    returned `Job` knows its processes on all hosts and its output so far, and sends signals to
    its ranks: ``job.signal_rank(1, signal.SIGSTOP)``.
    """

    def start(
        placement: Sequence[int], arguments: Arguments, *, env: Mapping[str, str] | None = None
    ) -> Job:
        if len(placement) > len(hosts.names):
            pytest.skip(f"needs {len(placement)} hosts, there are {len(hosts.names)}")
        # Emulated hosts share their cores: more threads would only wait for each other.
        env = {"OMP_NUM_THREADS": "1", **(env or {})}
        places = list(zip(hosts.names, placement, strict=False))
        forward = [*env, JOB_VARIABLE]
        command = mpiexec_command(sum(placement), arguments, hosts=places, forward=forward)
        return start_command(command, env=env)

    return start


@pytest.fixture
def set_link(hosts: Hosts, local_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Return a function that unplugs a host from the network: ``set_link(host, "down")``.

    All links are up again after the test, before `local_path` is removed. Skips the test on real
    machines.
    """
    skip_unless_emulated(hosts)

    def change(host: str, state: str) -> None:
        hosts.check(hosts.names[0], *links.set_link(host, state))

    yield change
    for host in hosts.names:
        change(host, "up")


@pytest.fixture
def duplicate_interface(hosts: Hosts) -> Iterator[None]:
    """Give all hosts an interface with the same address; on real machines, skip the test."""
    skip_unless_emulated(hosts)
    for command in links.set_duplicate(present=True):
        hosts.check_all(*command)
    yield
    for command in links.set_duplicate(present=False):
        hosts.check_all(*command)


@pytest.fixture
def local_path(hosts: Hosts) -> Iterator[Path]:
    """Return the path of an empty folder, a different one on each host, until the test ends."""
    path = Path("/dev/shm") / f"chainermn-{uuid.uuid4().hex}"
    hosts.check_all("mkdir", "-m", "700", str(path))
    yield path
    hosts.check_all("rm", "-r", str(path))


def skip_unless_emulated(hosts: Hosts) -> None:
    if not hosts.emulated:
        pytest.skip("tests leave the network of real machines alone")
