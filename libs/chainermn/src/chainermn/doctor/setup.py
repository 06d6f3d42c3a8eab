"""What is examined: the options of the command line, and the answers that checks share."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from chainermn.doctor.facts import Answer, ask_hosts
from chainermn.doctor.probe import Outcome, ask, probe_command
from chainermn.launch.hosts import Host
from chainermn.launch.mpiexec import launch_environment, mpiexec_command


@dataclass
class Setup:
    """The installation that the doctor examines.

    Attributes
    ----------
    ranks : int, optional
        How many ranks the user means to start on this host.
    hosts : list of (str, int), optional
        Hosts, and how many ranks each takes.
    script, data : path, optional
        What the job needs on every host.
    forward : sequence of str
        Variables to forward to other hosts.
    network : str, optional
        The only network for Open MPI to use.
    limit : float
        Seconds that one probe may take.
    outcomes : dict
        What became of each probe so far, by its name, and by ``(name, "hosts")``.
    """

    ranks: int | None = None
    hosts: Sequence[Host] | None = None
    script: Path | None = None
    data: Path | None = None
    forward: Sequence[str] = ()
    network: str | None = None
    limit: float = 60.0
    outcomes: dict[str | tuple[str, str], Outcome] = field(default_factory=dict)

    def probe(self, name: str) -> Outcome:
        """Run a probe in a process of its own, once."""
        if name not in self.outcomes:
            self.outcomes[name] = ask(probe_command(name, self.limit), self.limit)
        return self.outcomes[name]

    def probe_ranks(self, name: str, ranks: int = 2) -> Outcome:
        """Run a probe on ranks of this host, under a real mpiexec, once."""
        if name not in self.outcomes:
            self.outcomes[name] = self._run(name, ranks, None)
        return self.outcomes[name]

    def probe_hosts(self, name: str) -> Outcome:
        """Run a probe on all the ranks of all the hosts, once."""
        hosts = self.hosts or ()
        if (name, "hosts") not in self.outcomes:
            self.outcomes[name, "hosts"] = self._run(name, sum(n for _, n in hosts), hosts)
        return self.outcomes[name, "hosts"]

    def _run(self, name: str, ranks: int, hosts: Sequence[Host] | None) -> Outcome:
        forward = [name for name in self.forward if name in os.environ]
        program = probe_command(name, self.limit)
        try:
            command = mpiexec_command(ranks, program, python=False, hosts=hosts, forward=forward)
            environment = launch_environment(hosts, network=self.network)
        except (OSError, RuntimeError, ValueError) as error:
            return Outcome(failure=str(error))
        return ask(command, self.limit, environment)

    @property
    def places(self) -> Sequence[Host]:
        """The hosts; without any, this one with its ranks."""
        return self.hosts or [(socket.gethostname(), self.ranks or 1)]

    @cached_property
    def facts(self) -> dict[str, Answer]:
        """What each host says about itself."""
        paths = [str(path.absolute()) for path in (self.script, self.data) if path]
        return ask_hosts([name for name, _ in self.places], paths)
