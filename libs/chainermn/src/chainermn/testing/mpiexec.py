"""Run jobs of several ranks, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from chainermn.launch.mpiexec import find_mpiexec as find_mpiexec
from chainermn.launch.mpiexec import launch_environment as launch_environment
from chainermn.launch.mpiexec import mpi_flavour as mpi_flavour
from chainermn.launch.mpiexec import mpiexec_command as mpiexec_command
from chainermn.notes import without_notes

#: Seconds for processes to end after ``mpiexec``: Open MPI's daemons take a moment, more on a busy
#: machine. Processes that outlive it have been left behind.
_GRACE = 20.0
#: Every process of a job inherits this variable, by which processes left behind are found.
JOB_VARIABLE = "CHAINERMN_TESTING_JOB"


def direct_environment() -> dict[str, str]:
    """Return an environment in which commands find this Python, and ``mpiexec`` runs anywhere."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**launch_environment(), "PATH": path}


@dataclass
class JobResult:
    """How a job ended.

    Attributes
    ----------
    returncode : int
        Exit code of ``mpiexec``.
    stdout, stderr : str
        Output of all ranks, without notes (``chainermn.notes``), which depend on the machine.
    seconds : float
        Wall time of ``mpiexec``.
    timed_out : bool
        Whether the job was killed because it took too long.
    left_behind : list of str
        Command lines of processes that outlived ``mpiexec`` and were then killed.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    left_behind: list[str] = field(default_factory=list)

    def check(self, *, fails: bool = False, warns: bool = False) -> JobResult:
        """Return this; raise AssertionError unless the job has ended as expected.

        That is by itself, leaving no process behind, and with an exit code that is 0 unless it
        ``fails``. Unless it ``fails``, there is something on standard error only if it ``warns``.
        """
        if fails:
            is_expected = self.returncode != 0
        else:
            is_expected = (self.returncode, self.stderr != "") == (0, warns)
        if self.timed_out or self.left_behind or not is_expected:
            raise AssertionError(f"expected fails={fails}, warns={warns}, got {self}")
        return self


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Return the running processes on this host that have inherited a variable of this value."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            has_it = process.environ().get(name) == value
            if has_it and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Job:
    """A running ``mpiexec`` with its ranks; takes what `run_job` takes."""

    def __init__(
        self,
        ranks: int,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        # Files, not pipes: a process left behind would keep a pipe open and block the reader.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            mpiexec_command(ranks, arguments),
            env={**launch_environment(), **(env or {}), JOB_VARIABLE: self._mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )
        self._started = time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """Return all running processes of the job, including ``mpiexec``."""
        return processes_with(JOB_VARIABLE, self._mark)

    def output(self) -> tuple[str, str]:
        """Return standard output and standard error so far."""
        texts = []
        for stream in (self._out, self._err):
            # Reading would move the position at which the job writes.
            written = os.pread(stream.fileno(), os.fstat(stream.fileno()).st_size, 0)
            texts.append(written.decode(errors="replace").replace("\0", ""))
        return texts[0], texts[1]

    def kill(self) -> tuple[str, str]:
        """Kill the job, wait until all its processes are gone, and return its output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)  # lets mpiexec end its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=2)
        strays = self.processes()
        for stray in strays:
            with contextlib.suppress(psutil.Error):
                stray.kill()
        psutil.wait_procs(strays, timeout=60)
        self.process.wait(timeout=60)
        output = self.output()
        self._out.close()
        self._err.close()
        return output

    def wait(self, timeout: float) -> JobResult:
        """Wait for the end of the job, at most ``timeout`` seconds, and clean up after it."""
        timed_out = False
        try:
            self.process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        except BaseException:  # an interrupt, which does not reach the ranks' session
            self.kill()
            raise
        seconds = time.monotonic() - self._started
        left_behind = []
        if not timed_out:
            psutil.wait_procs(self.processes(), timeout=_GRACE)
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    left_behind.append(" ".join(process.cmdline()))
        stdout, stderr = self.kill()
        return JobResult(
            self.process.returncode, stdout, without_notes(stderr), seconds, timed_out, left_behind
        )


def run_job(
    ranks: int,
    arguments: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> JobResult:
    """Run ``mpiexec -n ranks python *arguments``, at most ``timeout`` seconds.

    ``arguments`` are a script and its arguments, or ``-m module``. ``env`` has environment
    variables, added to those of this process; ``cwd`` is the working directory of the ranks.
    Never raises if the job fails: see the :class:`JobResult`.
    """
    return Job(ranks, arguments, env=env, cwd=cwd).wait(timeout)
