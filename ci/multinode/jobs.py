"""Jobs of ranks on several hosts, which leave nothing behind on any."""

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
# How long daemons of an MPI may take to follow mpiexec.
_GRACE = 30.0
# Open MPI makes every ssh the leader of a process group, and so does the ssh itself; where cores
# are busy, mpiexec comes second, is refused, and says so. It means nothing.
_NOISE = re.compile(r"^\[.*\] plm:ssh: Warning: setpgid\(.*\) failed in parent .*\n", re.MULTILINE)


class Process(NamedTuple):
    """A process of a job. It belongs to a rank, or to MPI itself if ``rank`` is None."""

    host: str
    pid: int
    parent: int
    rank: int | None
    command: str


def output_of(job: JobResult) -> str:
    """Return what a job has printed that has to have ended well.

    Raises
    ------
    AssertionError
        If it has not, or has written to standard error, or has left a process behind.
    """
    fine = (job.returncode, job.timed_out, job.stderr, job.left_behind) == (0, False, "", [])
    assert fine, f"{job}"  # as a text, since pytest would shorten anything else
    return job.stdout


class Job:
    """A running ``mpiexec`` with its ranks.

    Parameters
    ----------
    hosts : Hosts
        Those on which it may have processes.
    command : sequence of str
        That of ``mpiexec``.
    env : mapping, optional
        Variables set on top of what is recommended for several hosts.

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
        # Files, not pipes: a stray process that keeps a pipe open would block the reader.
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

        That it does by itself, even if it cannot be reached by then.
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
        """Return what was written so far: standard output, and standard error without notes."""
        if self._out.closed:
            return self._final_output
        texts = []
        for stream in (self._out, self._err):
            # Not by reading: that would move the place at which the job writes.
            written = os.pread(stream.fileno(), os.fstat(stream.fileno()).st_size, 0)
            texts.append(_NOISE.sub("", written.decode(errors="replace").replace("\0", "")))
        return texts[0], without_notes(texts[1])

    def wait_for(self, text: str, *, timeout: float = 300) -> None:
        """Wait until the job has written a text, at most ``timeout`` seconds.

        Raises
        ------
        AssertionError
            If it has not, or ends before.
        """
        deadline = time.monotonic() + timeout
        while not any(text in written for written in self.output()):
            running = self.process.poll() is None and time.monotonic() < deadline
            assert running, f"no {text!r} in {self.output()}"
            time.sleep(0.05)

    def wait(self, timeout: float = 300) -> JobResult:
        """Wait for the end of the job, at most ``timeout`` seconds; clear up behind it.

        Processes that outlive ``mpiexec`` by some seconds are in ``left_behind``.
        """
        timed_out = False
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        seconds = time.monotonic() - self._started
        deadline = time.monotonic() + (0 if timed_out else _GRACE)
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if left:
            self.kill()
        self._close()
        left_behind = [] if timed_out else [f"{p.host} {p.pid} {p.command}" for p in left]
        return JobResult(self.process.returncode, *self.output(), seconds, timed_out, left_behind)

    def kill(self) -> list[Process]:
        """End the job by force; return which of its processes were alive."""
        if self._out.closed:
            return []
        if self.process.poll() is None:
            self.process.terminate()  # lets mpiexec end ranks it knows of
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
