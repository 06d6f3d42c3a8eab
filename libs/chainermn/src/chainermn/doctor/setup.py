"""The installation to examine: command-line options, and answers that checks share."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from chainermn.doctor.probe import TAKING_TURNS, Outcome, ask, probe_command
from chainermn.launch.hosts import Host, is_this_host
from chainermn.launch.mpiexec import SSH_OPTIONS, find_mpiexec, launch_environment, mpiexec_command
from chainermn.process.patience import run_patiently

NO_SSH = "there is no ssh on this host"
_SSH_FAILED = 255
# One process answers both, because the second probe needs the imports and success of the first.
_IMPORTING = ("chainer_computes", "public_names")
_HOST_FACTS = Path(__file__).with_name("host_facts.py")


@dataclass(frozen=True)
class Answer:
    """The output of `host_facts` on a host, or why ssh or Python failed there."""

    facts: dict[str, Any] = field(default_factory=dict)
    unreachable: str = ""
    no_python: str = ""


@dataclass
class Setup:
    """The installation that the doctor examines."""

    ranks: int | None = None  # number to start on this host
    hosts: Sequence[Host] | None = None  # names, and the number of ranks on each
    script: Path | None = None
    data: Path | None = None
    forward: Sequence[str] = ()  # variables to pass to other hosts
    network: str | None = None  # address range to which Open MPI is restricted
    parameters: float | None = None  # number of parameters of the model
    limit: float = 60.0  # seconds that one probe, or the answer of one host, may take
    # Outcomes of the probes that have run, by name, or by ``(name, "hosts")`` for those on hosts.
    outcomes: dict[str | tuple[str, str], Outcome] = field(default_factory=dict)
    _asked: dict[str, Future[Answer]] = field(default_factory=dict, init=False)

    def probe(self, name: str, ranks: int = 0) -> Outcome:
        """Run a probe once, in one process or on ranks of this host, and return its outcome."""
        if name not in self.outcomes:
            names = _IMPORTING if name in _IMPORTING else (name,)
            self.outcomes.update(self._run(names, ranks, None))
        return self.outcomes[name]

    def probe_hosts(self, name: str) -> Outcome:
        """Return a probe's outcome on all ranks of all hosts, where one job runs all probes."""
        if (name, "hosts") not in self.outcomes:
            hosts = self.hosts or ()
            names = ["ranks", "communicators"]
            if len(hosts) > 1:
                names = ["ranks", "speeds", "communicators", "exchange"]
                names += [] if self.parameters is None else ["settings"]
            found = self._run(names, sum(ranks for _, ranks in hosts), self.hosts)
            self.outcomes |= {(each, "hosts"): found[each] for each in names}
        return self.outcomes[name, "hosts"]

    def _run(
        self, names: Sequence[str], ranks: int, hosts: Sequence[Host] | None
    ) -> dict[str, Outcome]:
        program = probe_command(names, self.limit)
        if not ranks:
            return ask(program, names, self.limit)
        try:
            command = mpiexec_command(
                ranks, program, python=False, hosts=hosts, forward=self.forward
            )
            environment = launch_environment(hosts, network=self.network)
            if hosts and self._share_cores(hosts):
                environment = {**TAKING_TURNS, **environment}
            return ask(command, names, self.limit, environment)
        except (OSError, RuntimeError, ValueError) as error:
            return dict.fromkeys(names, Outcome(failure=str(error)))

    def _share_cores(self, hosts: Sequence[Host]) -> bool:
        """Tell whether a machine, which several hosts may share, has fewer cores than ranks."""
        ranks, cores = Counter[str](), Counter[str]()
        for host, number in hosts:
            facts = self.facts[host].facts
            if facts:
                ranks[facts["machine"]] += number
                cores[facts["machine"]] = max(cores[facts["machine"]], facts["cores"])
        return any(ranks[machine] > cores[machine] for machine in ranks)

    @property
    def places(self) -> Sequence[Host]:
        """The named hosts, or this host with its ranks if none is named."""
        return self.hosts or [(socket.gethostname(), self.ranks or 1)]

    @cached_property
    def facts(self) -> dict[str, Answer]:
        """The answers of all hosts about themselves, by name."""
        if not self._asked:
            self.ask_hosts()
        return {host: answer.result() for host, answer in self._asked.items()}

    def ask_hosts(self) -> None:
        """Start asking all hosts for `facts`, which takes long, without waiting for them."""
        try:
            mpiexec = str(find_mpiexec())
        except (OSError, RuntimeError):
            mpiexec = None
        paths = [str(path.absolute()) for path in (self.script, self.data) if path]
        # As a variable, since another host may have a Python too old for -P.
        python = ["env", "PYTHONSAFEPATH=1", sys.executable, "-"]
        python.append(json.dumps({"paths": paths, "mpiexec": mpiexec}))
        names = [name for name, _ in self.places]
        pool = ThreadPoolExecutor(len(names))
        self._asked = {name: pool.submit(_ask, name, python, self.limit) for name in names}


def _ask(host: str, python: list[str], limit: float) -> Answer:
    remotely = ["ssh", *SSH_OPTIONS, "--", host, shlex.join(python)]
    try:
        command = python if is_this_host(host) else remotely
        shown = run_patiently(command, limit, _HOST_FACTS.read_text(), errors="replace")
    except FileNotFoundError:
        return Answer(unreachable=NO_SSH)
    except subprocess.TimeoutExpired:
        return Answer(unreachable=f"no answer within {limit:g} s")
    said = (shown.stderr.strip().splitlines() or [f"exit code {shown.returncode}"])[-1].strip()
    if shown.returncode == _SSH_FAILED:
        return Answer(unreachable=said)
    try:
        # The last line, because the remote shell may print a greeting first.
        return Answer(json.loads(shown.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return Answer(no_python=said)
