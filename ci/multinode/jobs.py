"""Jobs of ranks on several hosts, which leave no process behind on any."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from chainermn.notes import without_notes
from chainermn.testing.mpiexec import JOB_VARIABLE, JobResult, launch_environment
from ci.multinode.hosts import Hosts

_MARKED = Path(__file__).with_name("marked.py")
# Both Open MPI and its ssh make that ssh the leader of a process group. If cores are busy, mpiexec
# comes second, is refused, and prints a warning that means nothing.
_NOISE = re.compile(r"^\[.*\] plm:ssh: Warning: setpgid\(.*\) failed in parent .*\n", re.MULTILINE)


class Process(NamedTuple):
    """A process of a job, which belongs to a rank or, if ``rank`` is None, to MPI itself."""

    host: str
    pid: int
    parent: int
    rank: int | None
    command: str


def output_of(job: JobResult) -> str:
    """Return the output of a job that must have succeeded.

    Raises
    ------
    AssertionError
        If it failed, wrote to standard error, or left a process behind.
    """
    fine = (job.returncode, job.timed_out, job.stderr, job.left_behind) == (0, False, "", [])
    assert fine, f"{job}"  # a text, because pytest shortens anything else
    return job.stdout


class Job:
    """A running ``mpiexec`` with its ranks.

    Parameters
    ----------
    hosts : Hosts
        Hosts on which it may have processes.
    command : sequence of str
        Command line of ``mpiexec``.
    env : mapping, optional
        Variables to set besides those recommended for several hosts.

    Attributes
    ----------
    process : subprocess.Popen
        ``mpiexec``.
    """

    def __init__(
        self, hosts: Hosts, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        self._hosts = hosts
        mark = uuid.uuid4().hex
        self._list_processes = [sys.executable, str(_MARKED), JOB_VARIABLE, mark]
        # Files, not pipes: a stray process that holds a pipe open would block the reader.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env={**launch_environment(hosts.places), **(env or {}), JOB_VARIABLE: mark},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def processes(self, on: Sequence[str] | None = None) -> list[Process]:
        """Return the living processes of the job on some hosts, by default on all.

        Raises
        ------
        ConnectionError
            If one of the hosts cannot be reached.
        """
        answers = self._hosts.check_all(*self._list_processes, on=on)
        return [
            Process(host, *process)
            for host, answer in answers.items()
            for process in json.loads(answer)
        ]

    def note_end(self, host: str, file: Path) -> None:
        """Have a host make a file once no process of the job is left there.

        The host does so even if it can no longer be reached by then.
        """
        list_here = shlex.join(self._list_processes)
        script = f'while [ "$({list_here})" != "[]" ]; do sleep 0.2; done; touch {file}'
        detached = f"setsid sh -c {shlex.quote(script)} </dev/null >/dev/null 2>&1 &"
        self._hosts.check(host, "sh", "-c", detached)

    def signal_rank(self, rank: int, number: signal.Signals) -> Process:
        """Send a signal to the process of a rank, not to its children; return the process."""
        mine = [process for process in self.processes() if process.rank == rank]
        pids = {process.pid for process in mine}
        (first,) = (process for process in mine if process.parent not in pids)
        self._signal(first, number)
        return first

    def _signal(self, process: Process, number: signal.Signals) -> None:
        send = f"import os; os.kill({process.pid}, {number.value})"
        self._hosts.run(process.host, [sys.executable, "-c", send])

    def output(self) -> tuple[str, str]:
        """Return the output so far: standard output, and standard error without notes."""
        if self._out.closed:
            return self._final_output
        texts = []
        for stream in (self._out, self._err):
            # Reading through this file object would move the position at which the job writes.
            written = os.pread(stream.fileno(), os.fstat(stream.fileno()).st_size, 0)
            texts.append(_NOISE.sub("", written.decode(errors="replace").replace("\0", "")))
        return texts[0], without_notes(texts[1])

    def wait_for(self, text: str, *, timeout: float = 300) -> None:
        """Wait until the job has written a text, for at most ``timeout`` seconds.

        Raises
        ------
        AssertionError
            If it has not by then, or ends earlier.
        """
        deadline = time.monotonic() + timeout
        while not any(text in written for written in self.output()):
            running = self.process.poll() is None and time.monotonic() < deadline
            assert running, f"no {text!r} in {self.output()}"
            time.sleep(0.05)

    def wait(self, timeout: float = 300, *, grace: float = 30) -> JobResult:
        """Wait at most ``timeout`` seconds for the end of the job; clean up after it.

        ``left_behind`` then has the processes that outlived ``mpiexec`` by ``grace`` seconds: an
        MPI's daemons take a moment to end.
        """
        timed_out = False
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        seconds = time.monotonic() - self._started
        deadline = time.monotonic() + (0 if timed_out else grace)
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if left:
            self.kill()
        self._close()
        left_behind = [] if timed_out else [f"{p.host} {p.pid} {p.command}" for p in left]
        return JobResult(self.process.returncode, *self.output(), seconds, timed_out, left_behind)

    def kill(self) -> list[Process]:
        """Kill the job; return those of its processes that were alive."""
        if self._out.closed:
            return []
        if self.process.poll() is None:
            self.process.terminate()  # lets mpiexec end the ranks that it knows
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=2)
        alive = self.processes()
        for process in alive:
            self._signal(process, signal.SIGKILL)
        self.process.kill()
        self.process.wait(timeout=10)
        self._close()
        return alive

    def _close(self) -> None:
        self._final_output = self.output()
        self._out.close()
        self._err.close()
