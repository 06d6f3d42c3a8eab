"""Hosts that ssh cannot reach are named before mpiexec starts."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chainermn.__main__ import main
from chainermn.launch import command, run
from chainermn.launch.mpiexec import OTHER_LAUNCHERS, mpi_flavor
from chainermn.launch.reachable import HostState, check_hosts, examine_hosts, unreachable


@pytest.fixture(autouse=True)
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all host names unknown except this host's, and ssh the only launcher."""
    really = socket.getaddrinfo

    def look_up(host: str, *arguments: Any, **options: Any) -> Any:
        if host not in ("localhost", "127.0.0.1"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return really(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name in OTHER_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts a shell script on PATH as ssh."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def put(*lines: str, other: str = "exit 255") -> None:
        path = tmp_path / "ssh"
        # Acts like `ssh -G -- name`, which prints the settings for a name.
        text = "\n".join(["#!/bin/sh", f'[ "$1 $2" = "-G --" ] || {other}', *lines, ""])
        path.write_text(text, errors="surrogateescape")
        path.chmod(0o755)

    return put


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port of this host on which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_name_that_there_is_not(ssh: Callable[..., None]) -> None:
    ssh('echo "hostname $3"')
    expected = "there is no host of this name (Name or service not known)"
    assert unreachable(["localhost", "a", socket.gethostname(), "b"]) == {
        "a": expected,
        "b": expected,
    }


def test_alias_of_ssh(ssh: Callable[..., None], port: int) -> None:
    ssh("echo hostname 127.0.0.1", f"echo port {port}", "echo proxycommand none")
    assert unreachable(["alias"]) == {}


def test_port_that_does_not_answer(ssh: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ssh("echo hostname 127.0.0.1", f"echo port {port}")
    expected = f"ssh's port {port} cannot be reached (Connection refused)"
    assert unreachable(["alias"]) == {"alias": expected}


@pytest.mark.parametrize(
    "line", ["echo proxyjump gate", "echo proxycommand nc", "exit 255", "kill $$"]
)
def test_what_cannot_be_known_is_left_to_ssh(line: str, ssh: Callable[..., None]) -> None:
    ssh(line, "echo hostname inside")
    assert unreachable(["inside"]) == {}


def test_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert unreachable(["a"]) == {}


@pytest.mark.parametrize("variable", ["HYDRA_LAUNCHER", "PRTE_MCA_plm", "SLURM_JOB_ID"])
def test_other_launchers_have_ways_of_their_own(
    variable: str, ssh: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh('echo "hostname $3"')
    assert "a" in unreachable(["a"])
    monkeypatch.setenv(variable, "1")
    assert unreachable(["a"]) == {}


# Runs the command in ssh's last argument on this host.
RUN = 'eval "exec sh -c \\"\\${$#}\\""'


def test_host_is_examined(
    ssh: Callable[..., None], port: int, started: Any, wait_until: Callable[..., bool]
) -> None:
    ssh("echo hostname 127.0.0.1", f"echo port {port}", other=RUN)
    (mark,) = set(started.environment) - set(os.environ)
    left = subprocess.Popen(["sleep", "86400"], env=started.environment)
    name = os.uname().nodename
    hosts = ["alias", "localhost"]
    assert examine_hosts(hosts, [sys.executable], f"{mark}=1") == {
        "alias": HostState("", name),
        "localhost": HostState("", name),
    }
    assert left.wait() == -signal.SIGKILL


def test_first_file_that_a_host_lacks_is_named(ssh: Callable[..., None], port: int) -> None:
    greet_and_run = f"{{ echo Welcome = to this host; {RUN}; }}"
    ssh("echo hostname 127.0.0.1", f"echo port {port}", other=greet_and_run)
    needed = [sys.executable, "/no/script with a space", "/no/other"]
    lack = "it has no /no/script with a space"
    assert examine_hosts(["alias"], needed) == {"alias": HostState(lack, os.uname().nodename)}
    with pytest.raises(ConnectionError, match=f"^alias: {lack}. To find out more, run: chainermn"):
        check_hosts([("alias", 2)], needed)
    check_hosts([("alias", 2)], needed[:1])


def test_nothing_is_ended_without_a_mark(
    ssh: Callable[..., None], port: int, started: Any
) -> None:
    ssh("echo hostname 127.0.0.1", f"echo port {port}", other=RUN)
    with subprocess.Popen(["sleep", "86400"], env=started.environment) as other:
        examine_hosts(["alias"], [])
        assert other.poll() is None
        other.kill()


def test_host_that_refuses(ssh: Callable[..., None], port: int) -> None:
    refuse = "{ echo Permission denied. >&2; exit 255; }"
    ssh("echo hostname 127.0.0.1", f"echo port {port}", other=refuse)
    found = examine_hosts(["alias"], [sys.executable], "A=1")
    assert found == {"alias": HostState("ssh fails: Permission denied")}


def test_control_characters_of_a_host_do_not_reach_the_terminal(
    ssh: Callable[..., None], port: int
) -> None:
    answers = ["host=a\x1b]0;title\a", "lacks=\x1b[2J\xff\x9b5m"]
    written = [line.encode("latin-1").decode("utf-8", "surrogateescape") for line in answers]
    for name, other in {
        "it has no": f"{{ printf '%s\\n' {shlex.join(written)}; exit; }}",
        "ssh fails:": f"{{ printf '%s\\n' {shlex.quote(written[1])} >&2; exit 255; }}",
    }.items():
        ssh("echo hostname 127.0.0.1", f"echo port {port}", other=other)
        obstacle = examine_hosts(["alias"], ["/file"])["alias"].obstacle
        assert obstacle.startswith(name)
        assert obstacle.endswith(r"\x1b[2J\udcff\udc9b5m")


def test_host_without_a_name_is_not_examined(ssh: Callable[..., None]) -> None:
    ssh('echo "hostname $3"')
    found = examine_hosts(["nosuchhost"], [sys.executable], "A=1")
    assert found["nosuchhost"].obstacle.startswith("there is no host of this name")


def test_other_launchers_examine_nothing(
    ssh: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh("exit 255")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert examine_hosts(["a"], ["/no/python"]) == {"a": HostState("")}


def test_launch_says_it_in_one_line(
    ssh: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(command, "run_to_end", lambda *arguments: started.append(arguments) or 0)
    ssh('echo "hostname $3"')
    hosts = ["launch", "--host", "localhost:1,nosuchhost:2,unused:1", "-n", "2", "hostname"]
    result = CliRunner().invoke(main, hosts)
    assert (result.exit_code, started) == (1, [])
    assert result.output == (
        "Error: nosuchhost: there is no host of this name (Name or service not known). "
        "To find out more, run: chainermn doctor --host nosuchhost:1\n"
    )
    assert CliRunner().invoke(main, [*hosts[:2], "localhost:2", *hosts[3:]]).exit_code == 0
    assert len(started) == 1


def test_launch_names_a_host_without_the_script(
    ssh: Callable[..., None], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_to_end", lambda *arguments: 0)
    script = tmp_path / "train.py"
    script.touch()
    absent = "{ sed s:train.py:absent: | exec sh; }"
    ssh("echo hostname 127.0.0.1", f"echo port {port}", other=absent)
    options = ["launch", "--host", "localhost:1,alias:2"]
    result = CliRunner().invoke(main, [*options, str(script)])
    assert (result.exit_code, result.output) == (
        1,
        f"Error: alias: it has no {tmp_path / 'absent'}. "
        "To find out more, run: chainermn doctor --host alias:2\n",
    )
    # Hosts need not have a file that is only an argument of another program.
    for others in (["cat", script], [sys.executable, "-c", "pass", script], ["-m", script]):
        assert CliRunner().invoke(main, [*options, *map(str, others)]).exit_code == 0


def test_launch_names_a_host_without_this_folder(
    ssh: Callable[..., None], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_to_end", lambda *arguments: 0)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    absent = f"{{ sed 's:{here}:{tmp_path}/absent:' | exec sh; }}"
    ssh("echo hostname 127.0.0.1", f"echo port {port}", other=absent)
    result = CliRunner().invoke(main, ["launch", "--host", "localhost:1,alias:1", "hostname"])
    named = f"alias: it has no {tmp_path}/absent. " in result.output
    # Open MPI then starts the ranks in the home folder.
    assert (result.exit_code, named) == ((1, True) if mpi_flavor() == "mpich" else (0, False))


def test_function_is_not_sent_to_a_host_that_there_is_not(ssh: Callable[..., None]) -> None:
    ssh('echo "hostname $3"')
    with pytest.raises(ConnectionError, match=r"^nosuchhost: there is no host of this name"):
        run(print, ranks=2, hosts="localhost:1,nosuchhost:1")
