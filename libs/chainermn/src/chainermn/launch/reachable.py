"""Find hosts that ssh cannot reach, and say so in one line where mpiexec takes thirty."""

from __future__ import annotations

import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from chainermn.launch.hosts import Host, is_this_host, show_by_host, show_places
from chainermn.launch.mpiexec import SSH_OPTIONS, starts_by_ssh

_SECONDS = 4.0
_SECONDS_TO_EXAMINE = 60.0
_AT_ONCE = 32

# The arguments are NAME=VALUE and a program.
_EXAMINE = """
for file in $(grep -lsF "$1" /proc/[0-9]*/environ); do
    pid=${file#/proc/}
    kill -KILL "${pid%/environ}" 2>/dev/null
done
uname -n
test -x "$2"
"""


class HostState(NamedTuple):
    """What is known of a host: why it cannot be used, if so, and how it calls itself."""

    obstacle: str
    name: str = ""


def check_reachable(hosts: Sequence[Host]) -> None:
    """Raise ConnectionError if ssh cannot reach one of the hosts."""
    obstacles = unreachable(name for name, _ in hosts)
    if obstacles:
        named = show_places(host for host in hosts if host[0] in obstacles)
        raise ConnectionError(
            f"{show_by_host(obstacles)}. Find out more with: chainermn doctor --host {named}"
        )


def unreachable(hosts: Iterable[str]) -> dict[str, str]:
    """Return the hosts that ssh cannot reach, each with the reason.

    Names are looked up as ssh does, with its own aliases and jump hosts (``~/.ssh/config``); then
    its port is asked for a connection. Takes at most 4 seconds.
    """
    if not starts_by_ssh():
        return {}
    names = [name for name in hosts if not is_this_host(name)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = zip(names, pool.map(_obstacle, names), strict=True)
        return {name: reason for name, reason in reasons if reason}


def examine_hosts(names: Sequence[str], program: str, mark: str) -> dict[str, HostState]:
    """Return which hosts can be used, and end what an earlier job has left on them.

    Parameters
    ----------
    names : sequence of str
    program : str
        Path of what a host must be able to execute.
    mark : str
        ``NAME=VALUE``: processes that have inherited this variable are killed.
    """
    if not starts_by_ssh():
        return dict.fromkeys(names, HostState(""))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        states = pool.map(lambda name: _examine(name, program, mark), names)
        return dict(zip(names, states, strict=True))


def _examine(name: str, program: str, mark: str) -> HostState:
    if is_this_host(name):
        return HostState("", socket.gethostname())
    if obstacle := _obstacle(name):
        return HostState(obstacle)
    script = shlex.join(["sh", "-c", _EXAMINE, "sh", mark, program])
    try:
        shown = subprocess.run(
            ["ssh", *SSH_OPTIONS, "--", name, script],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS_TO_EXAMINE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return HostState(f"ssh fails: {error}")
    if shown.returncode == 255:  # ssh's own
        lines = shown.stderr.strip().splitlines() or ["exit code 255"]
        return HostState(f"ssh fails: {lines[-1]}")
    return HostState(f"it has no {program}" if shown.returncode else "", shown.stdout.strip())


def _obstacle(name: str) -> str:
    """Return why ssh cannot reach a host; empty if it can, or goes another way."""
    settings = _ssh_settings(name)
    if settings is None or settings.keys() & {"proxyjump", "proxycommand"}:
        return ""
    host, port = settings.get("hostname", name), settings.get("port", "22")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS).close()
    except socket.gaierror as error:
        return f"there is no host of this name ({error.strerror})"
    except OSError as error:
        return f"port {port}, that of ssh, cannot be reached ({error.strerror or error})"
    return ""


def _ssh_settings(name: str) -> dict[str, str] | None:
    """Return ssh's settings for a host, names in lower case; None if they are not known."""
    try:
        shown = subprocess.run(
            ["ssh", "-G", "--", name],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if shown.returncode:
        return None
    pairs = (line.partition(" ") for line in shown.stdout.splitlines())
    return {key: value for key, _, value in pairs if value and value != "none"}
