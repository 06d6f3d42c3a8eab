"""Start jobs of several ranks, and leave no process of theirs behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from chainermn.launch.mpiexec import (
    find_mpiexec,
    launch_environment,
    mpi_flavour,
    mpiexec_command,
)
from chainermn.notes import without_notes

__all__ = [
    "Job",
    "JobResult",
    "find_mpiexec",
    "launch_environment",
    "mpi_flavour",
    "mpiexec_command",
    "run_job",
]

#: Seconds that processes have to follow ``mpiexec``: the daemons of Open MPI take a moment, and
#: longer on a busy machine. What is alive after that has been left behind.
_GRACE = 20.0
#: Every process of a job inherits this variable, so that strays can be found after it.
JOB_VARIABLE = "CHAINERMN_TESTING_JOB"


@dataclass
class JobResult:
    """How a job ended.

    Attributes
    ----------
    returncode : int
        Exit code of ``mpiexec``.
    stdout, stderr : str
        Output of all ranks together; without notes (``chainermn.notes``), which depend on the
        machine.
    seconds : float
        Wall time until ``mpiexec`` ended or was ended.
    timed_out : bool
        Whether the job had to be ended from outside.
    left_behind : list of str
        Command lines of processes that outlived ``mpiexec``; they have been killed.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    left_behind: list[str] = field(default_factory=list)


class Job:
    """A running ``mpiexec`` with its ranks.

    Parameters
    ----------
    ranks : int
        How many.
    arguments : sequence of str
        What each rank's Python is given: a script and its arguments, or ``-m module``.
    env : mapping, optional
        Variables set on top of this process' own.
    cwd : path, optional
        Working directory of the ranks.
    """

    def __init__(
        self,
        ranks: int,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        # Files, not pipes: a stray process that keeps a pipe open would block the reader.
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
        """Return every living process of the job, ``mpiexec`` included."""
        mine = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(JOB_VARIABLE) == self._mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    mine.append(process)
        return mine

    def output(self) -> tuple[str, str]:
        """Return what was written so far to standard output and to standard error."""
        texts = []
        for stream in (self._out, self._err):
            # Not by reading: that would move the place at which the job writes.
            written = os.pread(stream.fileno(), os.fstat(stream.fileno()).st_size, 0)
            texts.append(written.decode(errors="replace").replace("\0", ""))
        return texts[0], texts[1]

    def kill(self) -> tuple[str, str]:
        """End the job by force, wait until every process of it is gone, return its output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)  # lets mpiexec end ranks it knows of
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
        """Wait for the end of the job, at most ``timeout`` seconds; clear up behind it."""
        timed_out = False
        try:
            self.process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        except BaseException:  # an interrupt, which the ranks, in a session of their own, miss
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
    """Run ``mpiexec -n ranks python *arguments`` to its end, at most ``timeout`` seconds.

    A failure of the job raises nothing: it is in the :class:`JobResult`.
    """
    return Job(ranks, arguments, env=env, cwd=cwd).wait(timeout)
