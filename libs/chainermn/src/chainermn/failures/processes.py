"""The processes of this host, from ``/proc``. Elsewhere than on Linux there seem to be none.

Imports nothing but the standard library: `starting` runs without Chainer and MPI.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

# By their names, of which Linux keeps 15 characters.
_LAUNCHERS = ("hydra_", "mpiexec", "mpirun", "orted", "orterun", "prted", "prterun")

#: How MPICH and Open MPI tell a process its rank, their number, and that of those on its host.
RANK_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


@dataclass(frozen=True)
class Process:
    """A living process.

    Attributes
    ----------
    pid : int
    name : str
    parent : int
    started : str
        With the pid it tells a process from a later one that has got the same pid.
    """

    pid: int
    name: str = field(compare=False)  # it changes with exec
    parent: int = field(compare=False)  # it changes when the parent ends
    started: str

    @property
    def is_launcher(self) -> bool:
        """Whether it is MPI's: ``mpiexec``, or what that starts on each host."""
        return self.name.startswith(_LAUNCHERS)

    def is_alive(self) -> bool:
        """Tell whether it has not ended yet."""
        return find(self.pid) == self

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def find(pid: int) -> Process | None:
    """Return a process by its number; None if there is none, or it is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    return None if fields[0] in "ZX" else Process(pid, name, int(fields[1]), fields[19])


def all_processes() -> list[Process]:
    """Return every process that this one can see."""
    try:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return []
    return [process for process in map(find, pids) if process is not None]


def launchers_of(pid: int) -> list[Process]:
    """Return what of MPI's started a process, nearest first: at most a daemon and ``mpiexec``.

    Wrappers, such as a shell, may be between it and the first of them.
    """
    found: list[Process] = []
    process = find(pid)
    while process is not None and (parent := find(process.parent)) is not None:
        if parent.is_launcher:
            found.append(parent)
        elif found:
            break
        process = parent
    return found


def launched_as() -> tuple[int, int] | None:
    """Return the rank of this process and the number of ranks, as mpiexec has told it.

    None if it is not one that MPI has started itself: a rank's children inherit its variables.
    """
    me = find(os.getpid())
    launchers = launchers_of(os.getpid())
    if me is None or not launchers or me.parent != launchers[0].pid:
        return None
    for rank, size, _ in RANK_VARIABLES:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return None


def family_of(pid: int) -> list[Process]:
    """Return the process and all that descend from it, it first."""
    everything = all_processes()
    family = [process for process in everything if process.pid == pid]
    for member in family:
        family += [process for process in everything if process.parent == member.pid]
    return family


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables with which a process was started; none if it cannot be asked."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
