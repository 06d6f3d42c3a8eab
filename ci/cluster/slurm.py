"""Slurm on the emulated hosts: each is a node, and the first is also the controller."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ci.cluster.hosts import Host

_CPUS = 4
_CONF = Path(__file__).with_name("slurm.conf")
_START = Path(__file__).with_name("slurm.sh")
_SECONDS_TO_START = 60.0


def write(etc: Path, names: Sequence[str]) -> None:
    """Write files that hide those of the same names in the machine's ``/etc``."""
    for folder in ("slurm", "munge"):
        (etc / folder).mkdir(mode=0o755)
    nodes = [
        f"SlurmctldHost={names[0]}",
        *(f"NodeName={name} CPUs={_CPUS} State=UNKNOWN" for name in names),
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    (etc / "slurm/slurm.conf").write_text("\n".join([_CONF.read_text(), *nodes, ""]))
    key = etc / "munge/munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))


def start(hosts: Sequence[Host]) -> None:
    """Start Slurm, and wait until it accepts jobs.

    Raises
    ------
    RuntimeError
        If it does not start; the message quotes its output.
    """
    for host in hosts:
        started = _run(host.command("sh", str(_START), hosts[0].name))
        if started.returncode:
            raise RuntimeError(f"Slurm does not start on {host.name}: {_words_of(started)}")
    deadline = time.monotonic() + _SECONDS_TO_START
    show = hosts[0].command("sinfo", "--noheader", "--format=%t %D")
    while (shown := _run(show)).stdout.split() != ["idle", str(len(hosts))]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"Slurm does not start: {_words_of(shown)}")
        time.sleep(0.1)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def _words_of(ended: subprocess.CompletedProcess[str]) -> str:
    return " ".join((ended.stdout + ended.stderr).split())
