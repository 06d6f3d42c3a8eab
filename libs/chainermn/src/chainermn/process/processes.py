"""Find processes of this host in ``/proc``; on systems other than Linux, this finds none."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# Beginnings of process names, which Linux cuts to 15 characters.
_LAUNCHERS = ("hydra_", "mpiexec", "mpirun", "orted", "orterun", "prted", "prterun")

# Beginnings of the paths of memory that ranks share with MPICH, and with Open MPI.
_SHARED = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")  # noqa: S108

#: Beginning of the names of processes that `helper` starts.
HELPERS = "chainermn-"

# Variables that tell a rank its `Numbers`, with MPICH and with Open MPI.
_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


class Numbers(NamedTuple):
    """A rank, the number of ranks, and the number of ranks on the same host."""

    rank: int
    size: int
    local_size: int


@dataclass(frozen=True)
class Process:
    """A living process."""

    pid: int
    name: str = field(compare=False)  # changes with exec
    parent: int = field(compare=False)  # changes when the parent ends
    started: str  # differs between processes that reuse a pid

    @property
    def is_launcher(self) -> bool:
        """Whether it is ``mpiexec`` or the daemon that ``mpiexec`` starts on each host."""
        return self.name.startswith(_LAUNCHERS)

    @property
    def is_helper(self) -> bool:
        """Whether it helps to watch a rank and ends with it."""
        return self.name.startswith(HELPERS)

    def is_alive(self) -> bool:
        """Tell whether it is still running."""
        return find(self.pid) == self

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def find(pid: int) -> Process | None:
    """Return the process with a pid; None if it does not exist or is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    return None if fields[0] in "ZX" else Process(pid, name, int(fields[1]), fields[19])


def all_processes() -> list[Process]:
    """Return all processes that this process can see."""
    try:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return []
    return [process for process in map(find, pids) if process is not None]


def launchers_of(pid: int) -> list[Process]:
    """Return the daemon and the ``mpiexec`` that started a process, nearest first.

    Wrappers, such as a shell, may be between the process and its first launcher.
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


def shows_errors() -> bool:
    """Tell whether a terminal shows the standard error of this process, also under mpiexec."""
    launchers = launchers_of(os.getpid())
    pid = launchers[-1].pid if launchers else os.getpid()
    try:
        return os.readlink(f"/proc/{pid}/fd/2").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:  # not Linux, or another user's
        return False


def errors_of(process: Process) -> int | None:
    """Return a file descriptor that appends to the standard error of a process, if possible."""
    with contextlib.suppress(OSError):  # not Linux, another user's, or a socket
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
        return os.open(f"/proc/{process.pid}/fd/2", flags)
    return None


def numbers_in(environment: Mapping[str, str]) -> Numbers | None:
    """Return the numbers that mpiexec has set in an environment; None if it has not."""
    for names in _VARIABLES:
        rank, size, local_size = map(environment.get, names)
        if rank and size:
            return Numbers(int(rank), int(size), int(local_size or 0))
    return None


def launched_as() -> Numbers | None:
    """Return the numbers of this process if mpiexec started it, and None otherwise.

    The variables alone are not enough, because a rank's children inherit them.
    """
    launchers = launchers_of(os.getpid())
    return numbers_in(os.environ) if launchers and launchers[0].pid == os.getppid() else None


def family_of(pid: int) -> list[Process]:
    """Return a process, followed by all its descendants."""
    everything = all_processes()
    family = [process for process in everything if process.pid == pid]
    for member in family:
        family += [process for process in everything if process.parent == member.pid]
    return family


def shared_memory_of(pid: int) -> list[str]:
    """Return the files in which a rank shares memory with others; only MPI's end removes them."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return []
    return list(dict.fromkeys(word for word in maps.split() if word.startswith(_SHARED)))


def unlink_all(files: Iterable[str]) -> None:
    """Remove these files, unless another process was first."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def inheriting(name: str, value: str) -> list[Process]:
    """Return the processes of this host that have inherited a variable with this value."""
    return [each for each in all_processes() if environment_of(each.pid).get(name) == value]


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables with which a process was started; empty if they cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
