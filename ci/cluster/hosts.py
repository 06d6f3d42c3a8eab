"""Emulated hosts: namespaces with their own network, host name, processes and sshd.

There is no list of hosts. A host is its first process, recognized by its arguments. When that
process ends, all processes of the host end, and its network and its mounts disappear.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ci.cluster import requirements
from ci.cluster.files import OWN_FOLDER

_NAMESPACES = ["--mount", "--uts", "--ipc", "--net", "--pid"]
_FIRST_PROCESS = Path(__file__).with_name("host.sh")


@dataclass(frozen=True)
class Host:
    """A host that is up.

    Attributes
    ----------
    name : str
    pid : int
        Process id of its first process.
    """

    name: str
    pid: int

    def command(self, *arguments: str) -> list[str]:
        """Return a command that runs a command on this host, in the current folder."""
        enter = ["nsenter", f"--target={self.pid}", *_NAMESPACES, "--"]
        variables = [f"TMPDIR={OWN_FOLDER}", f"PATH={requirements.path()}"]
        env = ["env", f"--chdir={Path.cwd()}", *variables]
        return [*enter, *env, *arguments]

    def is_ready(self) -> bool:
        """Return whether the host, once it has a network, will answer ssh."""
        run = Path(f"/proc/{self.pid}/root/run")
        try:
            # Until the host has mounted its own /etc, it sees that of the host that starts it.
            return run.stat().st_dev != Path("/run").stat().st_dev and (run / "sshd.pid").exists()
        except FileNotFoundError:  # it has ended
            return False

    def processes(self) -> dict[int, str]:
        """Return pids, as the machine counts them, and command lines of this host's processes."""
        mine = _pid_namespace(self.pid)
        return {
            pid: " ".join(arguments)
            for pid, arguments in _commands()
            if _pid_namespace(pid) == mine
        }


def start(
    cluster: str, name: str, files: Path, log: IO[str], *, bound: bool
) -> subprocess.Popen[str]:
    """Start the first process of a host.

    Parameters
    ----------
    cluster, name : str
        Names of the cluster and of the host.
    files : path
        Folder that `files.write` has filled.
    log : file
        Log of the process and its sshd.
    bound : bool
        Whether the host ends with this process, however this process ends.
    """
    prefix = ["setpriv", "--pdeathsig=KILL"] if bound else []
    unshare = ["unshare", *_NAMESPACES, "--mount-proc", "--fork", "--kill-child=KILL"]
    first = ["sh", str(_FIRST_PROCESS), _tag(cluster), name, str(files)]
    return subprocess.Popen(
        [*prefix, *unshare, *first],
        cwd="/",
        env=requirements.environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        text=True,
    )


def find(cluster: str) -> list[Host]:
    """Return the hosts of a cluster in the order of their names."""
    found = []
    for pid, arguments in _commands():
        if arguments[:1] == ["sh"] and arguments[2:3] == [_tag(cluster)]:
            found.append(Host(arguments[3], pid))
    return sorted(found, key=lambda host: host.name)


def kill(cluster: str) -> None:
    """End all hosts of a cluster, including those that are still starting."""
    while processes := [pid for pid, arguments in _commands() if _tag(cluster) in arguments]:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _tag(cluster: str) -> str:
    return f"chainermn-cluster={cluster}"


def _commands() -> Iterator[tuple[int, Sequence[str]]]:
    """Yield pid and arguments of every process except zombies, which have no arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if arguments := path.read_text(errors="replace").split("\0")[:-1]:
                yield int(path.parent.name), arguments


def _pid_namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""
