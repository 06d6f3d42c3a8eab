"""Find hosts that cannot take ranks, and say why in one line.

In such cases mpiexec prints thirty lines or nothing. MPICH, for one, waits silently for the ranks
of a host that lacks the script.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from chainermn.launch.hosts import Host, is_this_host, printable, show_by_host, show_places
from chainermn.launch.mpiexec import SSH_OPTIONS, find_mpiexec, mpi_flavor, starts_by_ssh
from chainermn.process.patience import run_patiently

_SECONDS = 4.0
_SECONDS_TO_EXAMINE = 60.0
_AT_ONCE = 32

# The arguments are NAME=VALUE, or an empty string, and files. sh reads this from its input, since
# the shell that ssh starts may be a different one with different rules for lines and quotes.
_EXAMINE = """
[ -z "$1" ] || for file in $(grep -lsF "$1" /proc/[0-9]*/environ); do
    pid=${file#/proc/}
    kill -KILL "${pid%/environ}" 2>/dev/null
done
echo "host=$(uname -n)"
shift
for file; do
    test -e "$file" || { echo "lacks=$file"; break; }
done
"""


class HostState(NamedTuple):
    """A host's own name, and the reason why it cannot be used, if there is one."""

    obstacle: str
    name: str = ""


def needed_files(*own: str) -> list[str]:
    """Return the paths that each host needs for a job: mpiexec, these, and perhaps this folder."""
    # Open MPI starts ranks in the home folder if a host lacks the current one. MPICH fails.
    here = [os.getcwd()] if mpi_flavor() == "mpich" else []
    return [str(find_mpiexec()), *own, *here]


def check_hosts(hosts: Sequence[Host], files: Sequence[str]) -> None:
    """Raise ConnectionError if ssh cannot log in to a host or if a file is missing there."""
    states = examine_hosts([name for name, _ in hosts], files)
    obstacles = {name: state.obstacle for name, state in states.items() if state.obstacle}
    if obstacles:
        named = show_places(host for host in hosts if host[0] in obstacles)
        raise ConnectionError(
            f"{show_by_host(obstacles)}. To find out more, run: chainermn doctor --host {named}"
        )


def unreachable(hosts: Iterable[str]) -> dict[str, str]:
    """Return the hosts that ssh cannot reach, each with the reason.

    Looks names up as ssh does, with the aliases and jump hosts of ``~/.ssh/config``, and then
    connects to ssh's port. Takes at most 4 seconds.
    """
    if not starts_by_ssh():
        return {}
    names = [name for name in hosts if not is_this_host(name)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = zip(names, pool.map(_obstacle, names), strict=True)
        return {name: reason for name, reason in reasons if reason}


def examine_hosts(
    names: Sequence[str], files: Sequence[str], mark: str = ""
) -> dict[str, HostState]:
    """Find out which hosts can be used, and kill processes that an earlier job left there.

    Parameters
    ----------
    names : sequence of str
        Hosts to examine.
    files : sequence of str
        Paths of the files that a host must have.
    mark : str
        Variable, as ``NAME=VALUE``, that marks the processes to kill.
    """
    if not starts_by_ssh():
        return dict.fromkeys(names, HostState(""))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        states = pool.map(lambda name: _examine(name, files, mark), names)
        return dict(zip(names, states, strict=True))


def _examine(name: str, files: Sequence[str], mark: str) -> HostState:
    if is_this_host(name):
        return HostState("", socket.gethostname())
    if obstacle := _obstacle(name):
        return HostState(obstacle)
    try:
        shown = run_patiently(
            ["ssh", *SSH_OPTIONS, "--", name, "sh"],
            _SECONDS_TO_EXAMINE,
            f"set -- {shlex.join([mark, *files])}\n{_EXAMINE}",
            encoding="utf-8",
            errors="surrogateescape",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return HostState(f"ssh fails: {error}")
    if shown.returncode:
        lines = shown.stderr.strip().splitlines() or [f"exit code {shown.returncode}"]
        return HostState(f"ssh fails: {printable(lines[-1].rstrip('.'))}")
    said = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    lacks = said.get("lacks")
    return HostState(f"it has no {printable(lacks)}" if lacks else "", said.get("host", ""))


def _obstacle(name: str) -> str:
    """Return why ssh cannot reach a host; empty if it can, or if it goes through another one."""
    settings = _ssh_settings(name)
    if settings is None or settings.keys() & {"proxyjump", "proxycommand"}:
        return ""
    host, port = settings.get("hostname", name), settings.get("port", "22")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS).close()
    except socket.gaierror as error:
        return f"there is no host of this name ({error.strerror})"
    except OSError as error:
        return f"ssh's port {port} cannot be reached ({error.strerror or error})"
    return ""


def _ssh_settings(name: str) -> dict[str, str] | None:
    """Return ssh's settings for a host, with names in lower case; None if they are unknown."""
    try:
        shown = run_patiently(["ssh", "-G", "--", name], _SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if shown.returncode:
        return None
    pairs = (line.partition(" ") for line in shown.stdout.splitlines())
    return {key: value for key, _, value in pairs if value and value != "none"}
