"""Emulated hosts: processes with a network, a name, processes and an sshd of their own.

No list of them is kept. A host is its first process, which is told from others by its arguments;
with this process ends whatever runs on the host, and its network and its mounts are gone.
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
        Of its first process.
    """

    name: str
    pid: int

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs another one on this host, in the current folder."""
        enter = ["nsenter", f"--target={self.pid}", *_NAMESPACES, "--"]
        variables = [f"TMPDIR={OWN_FOLDER}", f"PATH={requirements.path()}"]
        env = ["env", f"--chdir={Path.cwd()}", *variables]
        return [*enter, *env, *arguments]

    def is_ready(self) -> bool:
        """Return whether it answers to ssh, once it has a network."""
        run = Path(f"/proc/{self.pid}/root/run")
        try:
            # Until it has mounted its own, it sees that of the host on which it is started.
            return run.stat().st_dev != Path("/run").stat().st_dev and (run / "sshd.pid").exists()
        except FileNotFoundError:  # it has ended
            return False

    def processes(self) -> dict[int, str]:
        """Return pids, as this machine counts them, and command lines of all that runs here."""
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
        Of the cluster and, in it, of the host.
    files : path
        What `files.write` has written.
    log : file
        For what the process and its sshd write.
    bound : bool
        Whether the host ends when this process does, however that happens.
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
    """Return the hosts of a cluster, in the order of their names."""
    found = []
    for pid, arguments in _commands():
        if arguments[:1] == ["sh"] and arguments[2:3] == [_tag(cluster)]:
            found.append(Host(arguments[3], pid))
    return sorted(found, key=lambda host: host.name)


def kill(cluster: str) -> None:
    """End all hosts of a cluster, those that are just being started too."""
    while processes := [pid for pid, arguments in _commands() if _tag(cluster) in arguments]:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _tag(cluster: str) -> str:
    return f"chainermn-cluster={cluster}"


def _commands() -> Iterator[tuple[int, Sequence[str]]]:
    """Yield pid and arguments of every process but zombies, which have none left."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if arguments := path.read_text(errors="replace").split("\0")[:-1]:
                yield int(path.parent.name), arguments


def _pid_namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""
