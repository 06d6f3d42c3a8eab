"""Ways in which a job of two ranks fails, and how it must end.

The same cases are tested on one host, tested on several, and measured.
"""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from chainermn.testing.mpiexec import JobResult

#: Script that each rank runs.
SCRIPT = Path(__file__).parent / "fail.py"
#: Seconds within which a job ends after a failure, or after the stall limit if silence is the only
#: sign of the failure.
BOUND = 10.0
#: Stall limit, in seconds, for failures that show only as silence.
STALL_LIMIT = 6.0

_GONE = ("rank {rank} on {host} (process ", "disappeared first, without a message")
_NOT_COME = (
    "allreduce (call 2 on communicator 1 of ranks 0-1)",
    "HAS NOT arrived: rank {rank} on {host}",
    "  has arrived: rank {other} on {other_host}",
)
_RAISED = ("rank {rank} of 2 on {host} failed",)


@dataclass(frozen=True)
class Case:
    """A way for a job to fail.

    Attributes
    ----------
    name : str
        Tells `SCRIPT` what one rank does while the other waits in an allreduce.
    texts : tuple of str
        Texts expected on standard error. ``{rank}`` and ``{host}`` stand for the rank that fails,
        ``{other}`` and ``{other_host}`` for the other one.
    stall_limit : float
        ``CHAINERMN_STALL_LIMIT``, in seconds.
    to_mpiexec : signal.Signals or None
        Signal sent to ``mpiexec`` once the script says that it is failing.
    """

    name: str
    texts: tuple[str, ...] = ()
    stall_limit: float = 300.0
    to_mpiexec: signal.Signals | None = None

    @property
    def bound(self) -> float:
        """Seconds within which the job has to end."""
        return BOUND + (self.stall_limit if self.stall_limit == STALL_LIMIT else 0.0)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the job."""
        return {"CHAINERMN_STALL_LIMIT": f"{self.stall_limit:g}"}


CASES = (
    Case("exception", (*_RAISED, "RuntimeError: by design")),
    Case("sys.exit 0", ("rank {rank} on {host} has ended its script", *_NOT_COME)),
    Case("sys.exit 3", ("rank {rank} on {host} has ended its script", *_NOT_COME)),
    Case("os._exit 0", _GONE),
    Case("SIGKILL", _GONE),
    Case("SIGTERM", _GONE),
    Case("segmentation fault", ("Segmentation fault", *_GONE)),
    Case("out of memory", (*_RAISED, "MemoryError")),
    Case("disk full", ("rank {rank}", "OSError", "File too large")),  # because all ranks raise
    Case("worker killed", (*_RAISED, "was killed by SIGKILL")),
    Case("SIGSTOP", ("rank {rank} on {host} (process ", "silent for", *_NOT_COME), STALL_LIMIT),
    Case("SIGINT to mpiexec", to_mpiexec=signal.SIGINT),
    Case("SIGTERM to mpiexec", ("mpiexec, or the whole job, got SIGTERM",), 300, signal.SIGTERM),
)


class RunningJob(Protocol):
    """A job on one host or on several."""

    process: subprocess.Popen[bytes]

    def output(self) -> tuple[str, str]:
        """Return standard output and standard error so far."""

    def wait(self, timeout: float) -> JobResult:
        """Wait for the end of the job, and clean up after it."""

    def kill(self) -> object:
        """End the job by force."""


@dataclass(frozen=True)
class Outcome:
    """How a failed job ended.

    Attributes
    ----------
    seconds : float
        Time from the failure to the end of ``mpiexec``.
    result : JobResult
    """

    seconds: float
    result: JobResult


def wait_for(job: RunningJob, text: str, times: int, timeout: float) -> None:
    """Wait until a job has printed a text ``times`` times.

    Raises
    ------
    AssertionError
        If the job ends first or takes too long; either way, it is killed.
    """
    deadline = time.monotonic() + timeout
    while (output := job.output())[0].count(text) < times:
        running = job.process.poll() is None or job.output() != output
        if not running or time.monotonic() > deadline:
            job.kill()
            raise AssertionError(f"no {times} x {text!r} in {output}")
        time.sleep(0.02)


def observe(case: Case, job: RunningJob, timeout: float = 120) -> Outcome:
    """Let a job fail, and wait up to ``timeout`` seconds for its end."""
    wait_for(job, "failing\n", 1, timeout)
    if case.to_mpiexec is not None:
        time.sleep(0.5)  # by then, the ranks are inside MPI
        job.process.send_signal(case.to_mpiexec)
    start = time.monotonic()
    while job.process.poll() is None and time.monotonic() < start + timeout:
        time.sleep(0.02)
    seconds = time.monotonic() - start
    return Outcome(seconds, job.wait(0.1 if job.process.poll() is None else timeout))


def check(case: Case, outcome: Outcome, hosts: tuple[str, str], rank: int = 1) -> None:
    """Check that a job ended by itself with the expected messages, however long it took.

    Parameters
    ----------
    case : Case
    outcome : Outcome
    hosts : tuple of str
        Hosts of the two ranks.
    rank : int
        The rank that failed.
    """
    result, other = outcome.result, 1 - rank
    assert not result.timed_out, result
    assert result.returncode != 0, result
    assert result.left_behind == [], result
    names = {"rank": rank, "host": hosts[rank], "other": other, "other_host": hosts[other]}
    for text in case.texts:
        assert text.format(**names) in result.stderr, (text.format(**names), result.stderr)
