"""What is examined: the options of the command line, and the answers that checks share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from chainermn.doctor import host_facts
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
        Variables that are to be forwarded.
    network : str, optional
        To which Open MPI is to keep.
    limit : float
        Seconds that one probe may take.
    """

    ranks: int | None = None
    hosts: Sequence[Host] | None = None
    script: Path | None = None
    data: Path | None = None
    forward: Sequence[str] = ()
    network: str | None = None
    limit: float = 60.0

    def probe(self, name: str, **arguments: Any) -> Outcome:
        """Run a probe in a process of its own."""
        return ask(probe_command(name, self.limit, **arguments), self.limit)

    def probe_ranks(
        self, name: str, ranks: int = 2, hosts: Sequence[Host] | None = None, **arguments: Any
    ) -> Outcome:
        """Run a probe on several ranks, under a real mpiexec; on this host by default."""
        forward = [name for name in self.forward if name in os.environ]
        program = probe_command(name, self.limit, **arguments)
        try:
            command = mpiexec_command(ranks, program, python=False, hosts=hosts, forward=forward)
            environment = launch_environment(hosts, network=self.network)
        except (OSError, RuntimeError, ValueError) as error:
            return Outcome([], str(error))
        return ask(command, self.limit, environment)

    @cached_property
    def cores(self) -> int:
        """How many cores this process may use."""
        return host_facts.cores()

    @cached_property
    def free_shared_memory(self) -> int:
        """Bytes left in ``/dev/shm``."""
        shm = os.statvfs("/dev/shm")
        return shm.f_bavail * shm.f_frsize

    @cached_property
    def two_ranks(self) -> Outcome:
        """What each of two ranks says about MPI: see ``probes/ranks.py``."""
        return self.probe_ranks("ranks")

    @cached_property
    def two_communicators(self) -> Outcome:
        """The all-reduces of every communicator on two ranks: see ``probes/communicators.py``."""
        return self.probe_ranks("communicators")

    @cached_property
    def compat(self) -> Outcome:
        """The report of chainer-compat: see ``probes/compat.py``."""
        return self.probe("compat")

    @cached_property
    def cuda(self) -> Outcome:
        """What the CUDA driver says: see ``probes/cuda.py``."""
        return self.probe("cuda")

    @cached_property
    def cupy(self) -> Outcome:
        """What CuPy and NCCL say: see ``probes/cupy_and_nccl.py``."""
        return self.probe("cupy_and_nccl")

    @cached_property
    def facts(self) -> dict[str, Answer]:
        """What each host says about itself."""
        return ask_hosts([name for name, _ in self.hosts or ()], self.script, self.data)

    @cached_property
    def tour(self) -> Outcome:
        """What every rank on all the hosts sees: see ``probes/surroundings.py``."""
        hosts = self.hosts or []
        return self.probe_ranks("surroundings", sum(n for _, n in hosts), hosts)
