"""Ask every host what it has, by ssh."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainermn.launch.hosts import is_this_host
from chainermn.launch.mpiexec import SSH_OPTIONS, find_mpiexec

_SCRIPT = Path(__file__).with_name("host_facts.py")
_LIMIT = 30.0
NO_SSH = "there is no ssh on this host"
_SSH_FAILED = 255


@dataclass(frozen=True)
class Answer:
    """The answer of one host.

    Attributes
    ----------
    facts : dict
        What `host_facts.collect` returned there.
    no_way_in : str
        Why ssh did not get there; empty if it did.
    no_python : str
        Why this interpreter did not answer there; empty if it did.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    no_way_in: str = ""
    no_python: str = ""


def ask_hosts(names: Sequence[str], paths: Sequence[str]) -> dict[str, Answer]:
    """Ask hosts, all at once, what they have; ``paths`` are looked for on each."""
    try:
        mpiexec = str(find_mpiexec())
    except (OSError, RuntimeError):
        mpiexec = None
    python = [sys.executable, "-", json.dumps({"paths": paths, "mpiexec": mpiexec})]
    with ThreadPoolExecutor(max(1, len(names))) as executor:
        return dict(zip(names, executor.map(lambda name: _ask(name, python), names), strict=True))


def _ask(host: str, python: list[str]) -> Answer:
    remotely = ["ssh", *SSH_OPTIONS, host, shlex.join(python)]
    try:
        shown = subprocess.run(
            python if is_this_host(host) else remotely,
            input=_SCRIPT.read_text(),
            capture_output=True,
            text=True,
            timeout=_LIMIT,
        )
    except FileNotFoundError:
        return Answer(no_way_in=NO_SSH)
    except subprocess.TimeoutExpired:
        return Answer(no_way_in=f"no answer within {_LIMIT:g} s")
    said = (shown.stderr.strip().splitlines() or [f"exit code {shown.returncode}"])[-1].strip()
    if shown.returncode == _SSH_FAILED:
        return Answer(no_way_in=said)
    try:
        # The last line: the shell over there may print a greeting first.
        return Answer(json.loads(shown.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return Answer(no_python=said)
