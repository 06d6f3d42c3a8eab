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
from chainermn.launch.mpiexec import mpi_flavor as mpi_flavor
from chainermn.launch.mpiexec import mpiexec_command as mpiexec_command
from chainermn.notes import without_notes
from chainermn.process.patience import wait_patiently
from chainermn.process.processes import shared_memory_of

#: Variable that every process of a job inherits, to find processes that are left behind.
JOB_VARIABLE = "CHAINERMN_TESTING_JOB"


def direct_environment() -> dict[str, str]:
    """Return an environment in which commands find this Python, and ``mpiexec`` runs anywhere."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**launch_environment(), "PATH": path}


@dataclass
class JobResult:
    """Result of a job, which `run_job` returns.

    Attributes
    ----------
    returncode : int
        Exit code of ``mpiexec``.
    stdout, stderr : str
        Output of all ranks. Notes about the machine (``chainermn.notes``) are left out.
    seconds : float
        Wall time of ``mpiexec`` in seconds.
    timed_out : bool
        Whether the job was killed because it took too long.
    left_behind : list of str
        Command lines of processes that ran longer than ``mpiexec``, and were killed.

    Examples
    --------
    >>> from chainermn.testing.mpiexec import run_job
    >>> result = run_job(2, ["-c", "raise SystemExit(3)"])
    >>> result.returncode, result.timed_out, result.left_behind
    (3, False, [])
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    left_behind: list[str] = field(default_factory=list)

    def check(self, *, fails: bool = False, warns: bool = False) -> JobResult:
        """Return the result; raise AssertionError unless the job ended as expected.

        The job must end by itself and leave no process behind. Its exit code must be 0, and it
        must not write to standard error.

        Parameters
        ----------
        fails : bool
            Whether the exit code must not be 0; standard error is then ignored.
        warns : bool
            Whether the job must write to standard error.
        """
        if fails:
            is_expected = self.returncode != 0
        else:
            is_expected = (self.returncode, self.stderr != "") == (0, warns)
        if self.timed_out or self.left_behind or not is_expected:
            raise AssertionError(f"expected fails={fails}, warns={warns}, got {self}")
        return self


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Return the running processes of this host that inherited a variable with this value."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            has_it = process.environ().get(name) == value
            if has_it and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Job:
    """A running ``mpiexec`` with its ranks; the parameters are those of `run_job`."""

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

    def _still_running(self, limit: float) -> list[psutil.Process]:
        """Wait, for a limited time, until no process is running; return those that still are.

        This does not wait until PID 1 has reaped them, which takes a second in some containers.
        """
        deadline = time.monotonic() + limit
        while (running := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return running

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
        shared = [file for each in self.processes() for file in shared_memory_of(each.pid)]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)  # lets mpiexec end its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=2)
        for stray in self.processes():
            with contextlib.suppress(psutil.Error):
                stray.kill()
        self._still_running(60)
        self.process.wait(timeout=60)
        for file in shared:
            Path(file).unlink(missing_ok=True)
        output = self.output()
        self._out.close()
        self._err.close()
        return output

    def _is_over_after(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is not None

    def wait(self, timeout: float, *, grace: float = 20) -> JobResult:
        """Wait for the end of the job, at most ``timeout`` seconds, and clean up after it.

        Processes that outlive ``mpiexec`` by ``grace`` seconds have been left behind: Open MPI's
        daemons take a moment to end, or longer on a busy machine.
        """
        try:
            timed_out = not wait_patiently(self._is_over_after, timeout)
        except BaseException:  # an interrupt, which does not reach the ranks' session
            self.kill()
            raise
        seconds = time.monotonic() - self._started
        left_behind = []
        if not timed_out:
            for process in self._still_running(grace):
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
    """Run a Python script on several ranks: ``mpiexec -n ranks python *arguments``.

    This does not raise if the job fails, so check the result.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    arguments : sequence of (str or path)
        Arguments of Python: a script and its arguments, or ``-m`` and a module.
    timeout : float
        Number of seconds after which the job is killed.
    env : mapping, optional
        Environment variables, in addition to those of this process.
    cwd : path, optional
        Working directory of the ranks; by default, that of this process.

    Returns
    -------
    JobResult
        Exit code and output.

    Examples
    --------
    >>> from chainermn.testing.mpiexec import run_job
    >>> from pathlib import Path
    >>> script = "from mpi4py import MPI; MPI.COMM_WORLD.rank or print(MPI.COMM_WORLD.size)"
    >>> length = Path("size.py").write_text(script)
    >>> run_job(2, ["size.py"]).check().stdout.strip()
    '2'
    """
    return Job(ranks, arguments, env=env, cwd=cwd).wait(timeout)
