"""Batch jobs of Slurm, which leave nothing behind after a test."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.multinode.hosts import Hosts

_MARKED = Path(__file__).resolve().parents[1] / "multinode/marked.py"
_ENDED = {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
#: Seconds after which something counts as hung, even on a busy machine.
LIMIT = 400.0
_ATTEMPTS = 10


class BatchJob:
    """A job that ``sbatch`` has accepted.

    Parameters
    ----------
    hosts : Hosts
        Hosts on which it may have processes.
    arguments : sequence of str
        Arguments of ``sbatch``, including the script and its arguments.
    folder : path
        Folder in which it runs and writes its output: ``{job}.log``, or ``{job}_{task}.log`` if it
        is an array.
    env : mapping
        Environment of ``sbatch``, and so of the job.
    """

    def __init__(
        self, hosts: Hosts, arguments: Sequence[str], folder: Path, env: Mapping[str, str]
    ) -> None:
        self._hosts, self.folder = hosts, folder
        is_array = any(argument.startswith("--array") for argument in arguments)
        log = folder / ("%A_%a.log" if is_array else "%j.log")
        submit = ["sbatch", "--parsable", f"--chdir={folder}", f"--output={log}", *arguments]
        ended = subprocess.run(submit, capture_output=True, text=True, env=env)
        assert ended.returncode == 0, ended
        self.id = int(ended.stdout)

    def output(self, task: int | None = None) -> str:
        """Return the output so far; if the job is an array, that of one task."""
        name = f"{self.id}.log" if task is None else f"{self.id}_{task}.log"
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self) -> list[dict[str, str]]:
        """Return what Slurm knows about the job; if it is an array, about every task."""
        shown = ask("scontrol", "show", "job", "--oneliner", str(self.id))
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in shown.splitlines()]

    def has_ended(self) -> bool:
        """Tell whether the whole job has ended and will not start again."""
        return all(record["JobState"] in _ENDED for record in self.records())

    def wait_for(self, text: str, *, task: int | None = None) -> None:
        """Wait until the job has written a text.

        Raises
        ------
        AssertionError
            If it ends before that, or hangs.
        """
        deadline = time.monotonic() + LIMIT
        while text not in self.output(task):
            fine = not self.has_ended() and time.monotonic() < deadline
            assert fine or text in self.output(task), f"no {text!r} in {self}"
            time.sleep(0.2)

    def wait(self, *, state: str = "COMPLETED") -> dict[str, str]:
        """Wait until the job has ended in a state and left no process; return its last record.

        Raises
        ------
        AssertionError
            If it ends in another state, or hangs.
        """
        deadline = time.monotonic() + LIMIT
        while not self.has_ended():
            assert time.monotonic() < deadline, f"hangs: {self}"
            time.sleep(0.2)
        assert {record["JobState"] for record in self.records()} == {state}, f"{self}"
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.2)
        return self.records()[-1]

    def processes(self) -> list[str]:
        """Return the hosts and command lines of the job's living processes."""
        found = []
        for record in self.records():
            command = [sys.executable, str(_MARKED), "SLURM_JOB_ID", record["JobId"]]
            for host, answer in self._hosts.check_all(*command).items():
                found += [f"{host}: {line}" for *_, line in json.loads(answer)]
        return found

    def cancel(self) -> None:
        """End the job if it still runs, and wait until Slurm says that it has ended."""
        subprocess.run(["scancel", str(self.id)], capture_output=True)
        deadline = time.monotonic() + LIMIT
        while not self.has_ended():
            assert time.monotonic() < deadline, f"hangs: {self}"
            time.sleep(0.2)

    def __repr__(self) -> str:
        outputs = {path.name: path.read_text() for path in self.folder.glob(f"{self.id}*.log")}
        return f"job {self.id}: {self.records()}, {outputs}"


def ask(*command: str) -> str:
    """Return the output of a query to Slurm; retry, because its controller drops a call at times.

    Raises
    ------
    AssertionError
        If it fails again and again.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(AssertionError):
            return run(*command)
        time.sleep(1.0)
    return run(*command)


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Run a command to its end; return its standard output.

    Raises
    ------
    AssertionError
        If it fails.
    """
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT)
    assert ended.returncode == 0, (shlex.join(command), ended.stdout, ended.stderr)
    return ended.stdout
