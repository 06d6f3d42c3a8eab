"""Several emulated hosts on one machine, which leave nothing behind."""

from __future__ import annotations

import math
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ci.cluster import files, hosts, links, requirements, slurm
from ci.cluster.hosts import Host

MOST_HOSTS = 99
_SECONDS_TO_START = 30.0


class ClusterError(RuntimeError):
    """The hosts cannot do what was asked; the message is one line."""


class Cluster:
    """The emulated hosts ``host00``, ``host01`` and so on. They go down at the end of a ``with``.

    Parameters
    ----------
    name : str
        Name of the cluster. Clusters cannot reach each other: each has its own network.
    """

    def __init__(self, name: str = "lab") -> None:
        self.name = name
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def hosts(self) -> list[Host]:
        """Return the hosts that are up.

        Raises
        ------
        ClusterError
            If there is none.
        """
        if found := hosts.find(self.name):
            return found
        raise ClusterError(f"no host of cluster {self.name} is up; 'up 2' starts two")

    def host(self, name: str) -> Host:
        """Return the host of this name.

        Raises
        ------
        ClusterError
            If it is not up.
        """
        up = {host.name: host for host in self.hosts()}
        if name in up:
            return up[name]
        raise ClusterError(f"expected one of {', '.join(up)}, got {name!r}")

    def up(
        self,
        number: int,
        *,
        rate: str | None = None,
        latency: float = 0.0,
        with_slurm: bool = False,
        ends_with_this_process: bool = False,
    ) -> None:
        """Start hosts, after ending those of an earlier start.

        Parameters
        ----------
        number : int
            Number of hosts, 1 to 99.
        rate : str, optional
            See `set_rate`.
        latency : float
            Seconds that each frame takes from host to host.
        with_slurm : bool
            Whether to start Slurm, with each host as a node.
        ends_with_this_process : bool
            Whether they end with this process, even if ``SIGKILL`` ends it. If so, call this
            in the main thread.

        Raises
        ------
        ClusterError
            If this machine cannot emulate hosts, or a host does not start.
        """
        if not 1 <= number <= MOST_HOSTS:
            raise ClusterError(f"expected 1 to {MOST_HOSTS} hosts, got {number}")
        if not 0 <= latency < math.inf:
            raise ClusterError(f"expected a latency of at least 0 s, got {latency}")
        if missing := requirements.find_missing(for_slurm=with_slurm):
            raise ClusterError(missing)
        self.down()
        names = [f"host{index:02}" for index in range(number)]
        try:
            with tempfile.TemporaryDirectory(prefix=f"cluster-{self.name}-") as folder:
                files.write(Path(folder), names)
                if with_slurm:
                    slurm.write(Path(folder, "etc"), names)
                self._start(names, Path(folder), ends_with_this_process)
            links.connect(self.hosts(), bridged=not latency)
            if latency:
                self._start_slow_switch(latency)
            self._wait_for_links()
            if rate:
                self.set_rate(rate)
            if with_slurm:
                self._start_slurm()
        except BaseException:
            self.down()
            raise

    def _start(self, names: Sequence[str], folder: Path, ends_with_this_process: bool) -> None:
        log = folder / "log"
        with log.open("w") as written:
            self._started = [
                hosts.start(self.name, name, folder, written, bound=ends_with_this_process)
                for name in names
            ]
        deadline = time.monotonic() + _SECONDS_TO_START
        while sum(host.is_ready() for host in hosts.find(self.name)) < len(names):
            ended = any(process.poll() is not None for process in self._started)
            if ended or time.monotonic() > deadline:
                said = " ".join(log.read_text().split())
                raise ClusterError(f"a host does not start: {said or 'it says nothing'}")
            time.sleep(0.02)

    def _wait_for_links(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while not all(map(links.is_running, self.hosts())):
            if time.monotonic() > deadline:
                raise ClusterError("a link between the hosts does not come up")
            time.sleep(0.02)

    def _start_slow_switch(self, latency: float) -> None:
        process = links.start_slow_switch(self.hosts(), latency)
        self._started.append(process)
        if process.poll() is not None:
            raise ClusterError("the switch does not start")

    def _start_slurm(self) -> None:
        try:
            slurm.start(self.hosts())
        except RuntimeError as error:
            raise ClusterError(str(error)) from error

    def down(self) -> None:
        """End all hosts and all processes on them."""
        hosts.kill(self.name)
        for process in self._started:
            process.wait()
        self._started = []

    def set_link(self, name: str, state: str) -> None:
        """Unplug a host from the network (``'down'``), or plug it in again (``'up'``)."""
        links.run_on(self.hosts()[0], [links.set_link(self.host(name).name, state)])

    def set_rate(self, rate: str, name: str | None = None) -> None:
        """Limit the speed of all links or of one host's, both ways.

        The rate is ``'100mbit'`` or the like, or ``'off'``.
        """
        first, *_ = up = self.hosts()
        for host in up if name is None else [self.host(name)]:
            to_host, from_host = links.set_rate(host.name, rate)
            links.run_on(first, [to_host])
            links.run_on(host, [from_host])

    def set_duplicate(self, *, present: bool) -> None:
        """Give every host an interface of the same address, or take it away."""
        for host in self.hosts():
            links.run_on(host, links.set_duplicate(present=present))
