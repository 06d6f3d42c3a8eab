"""Start jobs of several ranks, and leave no process of theirs behind."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

#: Every process of a job inherits this variable, so that strays can be found after it.
JOB_VARIABLE = "CHAINERMN_TESTING_JOB"

# Open MPI refuses to run as root, warns about fabrics that a laptop lacks, and spins while it
# waits, which starves the other ranks where there are more ranks than cores. On a machine without
# ssh it forgets how many ranks it was told to put on this host, unless it is told not to need any.
_OPEN_MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_plm_ssh_agent": "/bin/false",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@functools.cache
def find_mpiexec() -> Path:
    """Return the ``mpiexec`` of this Python environment, else the one on ``PATH``.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    beside_python = Path(sysconfig.get_path("scripts")) / "mpiexec"
    found = beside_python if beside_python.exists() else shutil.which("mpiexec")
    if not found:
        raise FileNotFoundError(
            "no mpiexec beside this Python or on PATH; "
            "install an MPI, for example with: pip install 'chainermn[mpich]'"
        )
    return Path(found)


@functools.cache
def mpi_flavour() -> str:
    """Return ``'mpich'`` or ``'openmpi'``: whose ``mpiexec`` :func:`find_mpiexec` found.

    Raises
    ------
    RuntimeError
        If its ``--version`` names neither.
    """
    shown = subprocess.run(
        [find_mpiexec(), "--version"],
        capture_output=True,
        text=True,
        env={**os.environ, **_OPEN_MPI_SETTINGS},
        stdin=subprocess.DEVNULL,
    )
    version = shown.stdout + shown.stderr
    if "HYDRA" in version:
        return "mpich"
    if "Open MPI" in version or "prte" in version.lower():
        return "openmpi"
    raise RuntimeError(f"{find_mpiexec()} is neither MPICH's nor Open MPI's: {version[:200]!r}")


def launch_environment() -> dict[str, str]:
    """Return this process' environment with what ``mpiexec`` needs to run anywhere.

    Variables that the user has set stay as they are.
    """
    return {**(_OPEN_MPI_SETTINGS if mpi_flavour() == "openmpi" else {}), **os.environ}


def mpiexec_command(
    ranks: int, arguments: Sequence[str | os.PathLike[str]], *, python: bool = True
) -> list[str]:
    """Return the command line that starts ``ranks`` ranks on this host.

    Parameters
    ----------
    ranks : int
    arguments : sequence of str
        What each rank's Python is given: a script and its arguments, or ``-m module``.
    python : bool
        If false, ``arguments`` are a whole command themselves.
    """
    # Open MPI otherwise refuses more ranks than cores.
    placement = ["--host", f"localhost:{ranks}"] if mpi_flavour() == "openmpi" else []
    program = [sys.executable, *arguments] if python else arguments
    command = [find_mpiexec(), *placement, "-n", str(ranks), *program]
    return [os.fspath(part) for part in command]


@dataclass
class JobResult:
    """How a job ended.

    Attributes
    ----------
    returncode : int
        Exit code of ``mpiexec``.
    stdout, stderr : str
        Output of all ranks together.
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
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace").replace("\0", ""))
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
        psutil.wait_procs(strays, timeout=10)
        self.process.wait(timeout=10)
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
            psutil.wait_procs(self.processes(), timeout=2)  # daemons of Open MPI take a moment
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    left_behind.append(" ".join(process.cmdline()))
        stdout, stderr = self.kill()
        return JobResult(self.process.returncode, stdout, stderr, seconds, timed_out, left_behind)


def run_job(
    ranks: int,
    arguments: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> JobResult:
    """Run ``mpiexec -n ranks python *arguments`` to its end, at most ``timeout`` seconds.

    A failure of the job raises nothing: it is in the :class:`JobResult`.
    """
    return Job(ranks, arguments, env=env, cwd=cwd).wait(timeout)
