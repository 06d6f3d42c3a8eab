"""The hosts that tests run on: emulated by ``ci/cluster``, or real machines."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chainermn.launch.hosts import read_hostfile
from chainermn.launch.mpiexec import SSH_OPTIONS

#: File with the names of all emulated hosts.
EMULATED_HOSTFILE = Path("/run/hostfile")


class Hosts:
    """The hosts of a hostfile. Pytest runs on the first.

    Parameters
    ----------
    hostfile : path
        One host per line. The tests decide how many ranks each gets.

    Attributes
    ----------
    places : list of (str, int)
        Host and number of slots of each line of the file.
    names : list of str
    emulated : bool
        Whether links can be changed.
    """

    def __init__(self, hostfile: Path) -> None:
        self.places = read_hostfile(hostfile)
        self.names = [name for name, _ in self.places]
        self.emulated = hostfile == EMULATED_HOSTFILE

    def run(
        self, host: str, command: Sequence[str], *, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, in the current folder; return its outcome.

        Raises
        ------
        ConnectionError
            If the host cannot be reached.
        """
        if host != self.names[0]:
            line = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(command)}"
            command = ["ssh", *SSH_OPTIONS, "--", host, line]
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
        if ended.returncode == 255:  # ssh's own
            raise ConnectionError(f"{host} cannot be reached: {ended.stderr.strip()}")
        return ended

    def check(self, host: str, *command: str) -> str:
        """Run a command on a host; return its output.

        Raises
        ------
        AssertionError
            If it fails.
        """
        ended = self.run(host, command)
        assert ended.returncode == 0, (host, ended)
        return ended.stdout

    def check_all(self, *command: str, on: Iterable[str] | None = None) -> dict[str, str]:
        """Run a command on some hosts in parallel, by default on all; return their outputs."""
        names = list(self.names if on is None else on)
        with ThreadPoolExecutor() as executor:
            printed = executor.map(lambda host: self.check(host, *command), names)
            return dict(zip(names, printed, strict=True))
