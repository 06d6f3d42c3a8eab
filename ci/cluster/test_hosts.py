"""What emulated hosts can do, and that they leave nothing behind.

``nox -s multinode_tests`` runs this before the tests on such hosts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ci.cluster import requirements
from ci.cluster.cluster import Cluster

PROGRAM = Path(__file__).resolve().parent
FOR_EVER = ["sleep", "86400"]
HOSTS = ["host00", "host01"]
#: Seconds after which something counts as hung, even on a busy machine.
LIMIT = 120


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """Return two hosts that are up."""
    with Cluster(f"test-{uuid.uuid4().hex}") as cluster:
        cluster.up(2, ends_with_this_process=True)
        yield cluster


@pytest.fixture
def name() -> Iterator[str]:
    """Return a name for clusters; fail if they leave anything behind when the test ends."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    left = traces(name)
    Cluster(name).down()
    assert not left


def traces(name: str) -> list[str]:
    """Return the processes and files of clusters whose names begin with ``name``."""
    found = list(map(str, Path(tempfile.gettempdir()).glob(f"cluster-{name}*")))
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            arguments = path.read_text(errors="replace").split("\0")
            if any(argument.startswith(f"chainermn-cluster={name}") for argument in arguments):
                found.append(" ".join(arguments))
    return found


@contextlib.contextmanager
def cluster(name: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start ``python ci/cluster``; kill it if it outlives the ``with`` block."""
    with subprocess.Popen(
        [sys.executable, PROGRAM, "--name", name, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def heed_signals() -> None:
    """Undo what a background job and ``nohup`` pass on: Python ignores what its parent ignores."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(name: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Run ``python ci/cluster``; return exit code, standard output and standard error."""
    with cluster(name, *arguments) as process:
        output, error = process.communicate(timeout=LIMIT)
    return process.returncode, output, error


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# What hosts are


def test_every_host_is_one_of_its_own(two: Cluster, tmp_path: Path) -> None:
    Path(tmp_path / "shared").touch()
    seen = [
        "hostname",
        "ssh host00 hostname",
        "ssh host01 hostname",
        "ssh host01 'echo $SHELL'",
        "touch /dev/shm/$(hostname)",
        "ls /dev/shm",
        "touch $TMPDIR/$(hostname)",
        "ssh $(hostname) 'ls $TMPDIR'",
        "cat /etc/hostname",
        f"ls {tmp_path}",
        "tr '\\0' : </proc/1/cmdline | cut -d : -f 1,4",
        "pwd",
    ]
    for host in ("host00", "host01"):
        printed = run(two.name, "exec", host, "sh", "-ec", "\n".join(seen))
        expected = [host, "host00", "host01", "/bin/sh", host, host, host, "shared", f"sh:{host}"]
        assert printed == (0, "\n".join([*expected, str(Path.cwd()), ""]), "")


@pytest.mark.parametrize(
    ("code", "command"),
    [
        (0, ["true"]),
        (7, ["sh", "-c", "exit 7"]),
        (143, ["sh", "-c", "kill -TERM $$"]),
        (127, ["no-such-program"]),
    ],
)
def test_exit_code_of_exec(two: Cluster, code: int, command: list[str]) -> None:
    assert run(two.name, "exec", "host01", *command)[0] == code


def test_exec_passes_on_arguments_and_environment(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOR", "green")
    command = ["sh", "-c", 'echo "$COLOR" "$@"', "sh", "--", "-x", "a b", "--name"]
    assert run(two.name, "exec", "host00", *command) == (0, "green -- -x a b --name\n", "")


def test_processes(two: Cluster) -> None:
    with cluster(two.name, "exec", "host01", *FOR_EVER) as running:

        def shown() -> list[list[str]]:
            lines = run(two.name, "processes")[1].splitlines()
            return [line.split() for line in lines if " ".join(FOR_EVER) in line]

        wait_for(shown)
        ((host, pid, *command),) = shown()
        assert (host, command) == ("host01", FOR_EVER)
        os.kill(int(pid), signal.SIGTERM)
        assert running.wait(LIMIT) == 143


# The network


def test_rate(two: Cluster) -> None:
    def shown() -> list[str]:
        """Return what limits the links: at the switch, then at the other end of each."""
        at_switch = run(two.name, "exec", "host00", "tc", "-netns", "switch", "qdisc", "show")[1]
        at_hosts = (run(two.name, "exec", host, "tc", "qdisc", "show")[1] for host in HOSTS)
        lines = "".join([at_switch, *at_hosts]).splitlines()
        return [line for line in lines if "tbf" in line]

    assert run(two.name, "rate", "40mbit") == (0, "", "")
    limits = shown()
    assert all("rate 40Mbit" in line for line in limits)
    devices = [line.split()[line.split().index("dev") + 1] for line in limits]
    assert sorted(devices) == ["eth0", "eth0", *HOSTS]
    assert run(two.name, "rate", "off", "host01") == (0, "", "")
    assert len(shown()) == 2
    assert not any("host01" in line for line in shown())
    assert run(two.name, "rate", "off") == (0, "", "")
    assert shown() == []


def test_latency(name: str) -> None:
    """A connection takes at least the way there and back; large messages arrive whole."""
    connect = (
        "import socket, sys, time; start = time.perf_counter(); "
        "socket.create_connection((sys.argv[1], 22)); print(time.perf_counter() - start)"
    )
    send = "head -c 3000000 /dev/zero | ssh $0 'wc -c'"
    with Cluster(name) as cluster:
        cluster.up(3, rate="1gbit", latency=0.05)
        for other in "host01", "host02":
            code, output, error = run(name, "exec", "host00", sys.executable, "-c", connect, other)
            assert (code, error) == (0, "")
            assert float(output) >= 0.1
            sent = run(name, "exec", "host00", "sh", "-c", send, other)
            assert sent == (0, "3000000\n", "")


def test_link(two: Cluster) -> None:
    call = ["exec", "host00", "ssh", "-o"]
    assert run(two.name, "link", "host01", "down") == (0, "", "")
    code, _, error = run(two.name, *call, "ConnectTimeout=1", "host01", "true")
    assert code == 255
    assert "host01" in error
    assert run(two.name, "link", "host01", "up") == (0, "", "")
    assert run(two.name, *call, "ConnectTimeout=60", "host01", "true") == (0, "", "")


def test_duplicate_interface(two: Cluster) -> None:
    show = ["ip", "-brief", "address", "show", "to", "172.17.0.1"]
    for state, lines in ("on", 1), ("off", 0):
        assert run(two.name, "docker0", state) == (0, "", "")
        for host in ("host00", "host01"):
            code, shown, error = run(two.name, "exec", host, *show)
            assert (code, shown.count("172.17.0.1/16"), error) == (0, lines, "")


# Beginning and end


def test_two_clusters_do_not_meet(two: Cluster, name: str) -> None:
    assert run(name, "up", "1") == (0, "", "")
    assert run(name, "exec", "host00", "cat", "/run/hostfile") == (0, "host00\n", "")
    code, _, error = run(name, "exec", "host00", "ssh", "-o", "ConnectTimeout=1", "10.77.0.2")
    assert (code, "10.77.0.2" in error) == (255, True)
    assert run(name, "down") == (0, "", "")
    assert [host.name for host in two.hosts()] == ["host00", "host01"]


def test_up_replaces_what_is_up(name: str) -> None:
    assert run(name, "up", "2") == (0, "", "")
    assert run(name, "up", "1") == (0, "", "")
    assert [host.name for host in Cluster(name).hosts()] == ["host00"]
    assert run(name, "down") == (0, "", "")
    assert run(name, "down") == (0, "", "")


def test_up_and_down_change_nothing_of_the_machine(name: str) -> None:
    def machine() -> list[str]:
        names = ("host00", "switch", "docker0-peer", "10.77.0.")
        texts = [Path("/proc/mounts").read_text(), Path("/etc/hosts").read_text()]
        for arguments in ["netns", "list"], ["-oneline", "link"], ["-oneline", "address"]:
            command, env = ["ip", *arguments], requirements.environment()
            texts.append(subprocess.check_output(command, text=True, env=env))
        lines = "\n".join(texts).splitlines()
        return [line for line in lines if any(name in line for name in names)]

    before = machine()
    assert run(name, "up", "2") == (0, "", "")
    assert run(name, "docker0", "on") == (0, "", "")
    while_up = machine()
    assert run(name, "down") == (0, "", "")
    assert before == while_up == machine()


def test_run(name: str) -> None:
    command = ["sh", "-c", "cat /run/hostfile; hostname; exit 7"]
    ended = run(name, "run", "--rate", "1gbit", "2", *command)
    assert ended == (7, "host00\nhost01\nhost00\n", "")


def test_run_with_a_path_without_roots_programs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cron, ``env -i`` and plain accounts have such a path."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    code, output, error = run(name, "run", "--rate", "1gbit", "1", "tc", "qdisc", "show")
    assert (code, error) == (0, "")
    assert "rate 1Gbit" in output


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_signal_while_a_command_runs(
    name: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    marker = tmp_path / "running"
    lines = f"sleep 86400 & ssh host01 sleep 86400 & touch '{marker}'; wait"
    with cluster(name, "run", "2", "setsid", "sh", "-c", lines) as process:
        wait_for(marker.exists)
        process.send_signal(number)
        assert process.wait(LIMIT) == code
    wait_for(lambda: not traces(name))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", [["up", "2"], ["run", "2", "true"]])
def test_signal_while_hosts_start(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
    command: list[str],
) -> None:
    # The hosts are there, but the program that connects them to the network hangs.
    marker, nsenter = tmp_path / "starting", tmp_path / "nsenter"
    nsenter.write_text(f"#!/bin/sh\ntouch '{marker}'\nexec sleep 86400\n")
    nsenter.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with cluster(name, *command) as process:
        wait_for(marker.exists)
        process.send_signal(number)
        assert process.wait(LIMIT) == code


def test_cluster_ends_with_a_failed_block(name: str) -> None:
    with pytest.raises(ZeroDivisionError), Cluster(name) as cluster:
        cluster.up(1)
        cluster.hosts()[0].pid / 0


# Wrong use


def test_unknown_host(two: Cluster) -> None:
    error = "cluster: expected one of host00, host01, got 'host09'\n"
    assert run(two.name, "exec", "host09", "true") == (2, "", error)
    assert run(two.name, "link", "host09", "up") == (2, "", error)


def test_wrong_rate(name: str) -> None:
    code, _, error = run(name, "up", "1", "--rate", "fast")
    assert code == 1
    assert error.startswith("cluster: ")
    assert "fast" in error


def test_wrong_latency(name: str) -> None:
    ended = run(name, "up", "1", "--latency", "-1")
    assert ended == (2, "", "cluster: expected a latency of at least 0 s, got -1.0\n")
