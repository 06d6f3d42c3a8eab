"""Find the hosts that Slurm has allocated to a job."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from chainermn.launch.hosts import Host, parse_pairs, show_hosts

_NODES, _TASKS = "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
# Matches node[01-03],login, but nothing that scontrol could take for an option.
_LIST = re.compile(r"\w[\w.,\[\]-]*", re.ASCII)
# 2(x3),1 means two tasks on each of three nodes, then one on another.
_REPEATED = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def allocated_hosts(environment: Mapping[str, str]) -> list[Host] | None:
    """Return the hosts of a process's Slurm allocation, each with its number of tasks.

    Parameters
    ----------
    environment : mapping
        Environment variables of the process.

    Returns
    -------
    list of (str, int), or None
        Hosts and the number of ranks on each; None outside of Slurm.

    Raises
    ------
    RuntimeError
        If Slurm's variables are incomplete, or if ``scontrol`` fails.
    """
    nodes = environment.get(_NODES, "")
    if not nodes:
        return None
    names = _expand(nodes)
    tasks = _parse_tasks(environment.get(_TASKS) or f"1(x{len(names)})")
    if len(tasks) != len(names):
        raise RuntimeError(
            f"cannot tell how many ranks each host takes: {_NODES}={nodes} names {len(names)} "
            f"hosts, but {_TASKS}={environment[_TASKS]} describes {len(tasks)}, as in a job step "
            "on part of an allocation or in a heterogeneous job; use --host a:2,b:1 instead"
        )
    try:
        return parse_pairs(zip(names, tasks, strict=True))
    except ValueError as error:
        raise RuntimeError(f"{_NODES}, {_TASKS}: {error}") from None


def check_allocated(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise RuntimeError if hosts are not in a process's Slurm allocation.

    Without ``scontrol``, the hosts of the allocation may be unknown; then this does nothing.
    """
    try:
        nodes = [name for name in _expand(environment.get(_NODES, "")) if name]
    except RuntimeError:
        return
    known = {name.partition(".")[0] for name in nodes}
    strange = [name for name in names if name.partition(".")[0] not in known]
    if nodes and strange:
        raise RuntimeError(
            f"{show_hosts(strange)}: not in this Slurm allocation, which has "
            f"{show_hosts(nodes)}; name only these hosts, or none to use them all"
        )


def _parse_tasks(text: str) -> list[int]:
    tasks = []
    for part in text.split(","):
        found = _REPEATED.fullmatch(part)
        if found is None:
            raise RuntimeError(f"expected {_TASKS} to look like 2(x3),1, got {text!r}")
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def _expand(nodes: str) -> list[str]:
    """Expand a list of nodes such as ``node[01-03],login`` into names."""
    if "[" not in nodes:
        return nodes.split(",")
    if not _LIST.fullmatch(nodes):
        raise RuntimeError(f"expected {_NODES} to look like node[01-03],login, got {nodes!r}")
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        shown = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        raise RuntimeError(
            f"cannot list the hosts of the allocation: {' '.join(command)}: {reason}; "
            "put scontrol on PATH, or name the hosts with --host"
        ) from error
    return shown.stdout.split()
