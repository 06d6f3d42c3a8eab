"""The ways in which jobs fail in tests, and what has to be true of each.

The same cases are tested on one host and on several, and measured. The script that the ranks run
is ``libs/chainermn/tests/failures/fail.py``.
"""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Protocol

from chainermn.testing.mpiexec import JobResult

#: Seconds in which a job ends after a failure; after one that is seen as silence only, in so many
#: after the stall limit.
BOUND = 10.0
#: Of the cases in which silence is all that is seen.
STALL_LIMIT = 6.0

_GONE = ("rank {rank} on {host} (process ", "is the first to be gone, without a word")
_NOT_COME = (
    "allreduce (call 2 on communicator 1 of ranks 0-1)",
    "HAS NOT come: rank {rank} on {host}",
    "  has come: rank {other} on {other_host}",
)
_RAISED = ("rank {rank} of 2 on {host} failed",)


@dataclass(frozen=True)
class Case:
    """A way to fail.

    Attributes
    ----------
    name : str
        What the script is told to do, on one of two ranks, while the other waits in an allreduce.
    texts : tuple of str
        What is written to standard error. ``{rank}`` and ``{host}`` are those of the rank that
        fails, ``{other}`` and ``{other_host}`` those of the other one.
    stall_limit : float
        ``CHAINERMN_STALL_LIMIT``, in seconds.
    to_mpiexec : signal.Signals or None
        What is sent to ``mpiexec`` then.
    """

    name: str
    texts: tuple[str, ...] = ()
    stall_limit: float = 300.0
    to_mpiexec: signal.Signals | None = None

    @property
    def bound(self) -> float:
        """Seconds in which the job has to end."""
        return BOUND + (self.stall_limit if self.stall_limit == STALL_LIMIT else 0.0)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the job."""
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
    Case("disk full", ("rank {rank}", "OSError", "File too large")),  # as all ranks raise
    Case("worker killed", (*_RAISED, "was killed by SIGKILL")),
    Case("SIGSTOP", ("rank {rank} on {host} (process ", "silent for", *_NOT_COME), STALL_LIMIT),
    Case("SIGINT to mpiexec", to_mpiexec=signal.SIGINT),
    Case("SIGTERM to mpiexec", to_mpiexec=signal.SIGTERM),
)


class RunningJob(Protocol):
    """What is needed of a job, on one host or on several."""

    process: subprocess.Popen[bytes]

    def output(self) -> tuple[str, str]:
        """Return what was written so far to standard output and to standard error."""

    def wait(self, timeout: float) -> JobResult:
        """Wait for the end of the job, and clear up behind it."""

    def kill(self) -> object:
        """End the job by force."""


@dataclass(frozen=True)
class Outcome:
    """How a job has ended that has failed.

    Attributes
    ----------
    seconds : float
        From the failure to the end of ``mpiexec``.
    result : JobResult
    """

    seconds: float
    result: JobResult


def wait_for(job: RunningJob, text: str, times: int, timeout: float) -> None:
    """Wait until a job has printed a text so often.

    Raises
    ------
    AssertionError
        If it has not, or ends before; it is killed then.
    """
    deadline = time.monotonic() + timeout
    while (output := job.output())[0].count(text) < times:
        running = job.process.poll() is None or job.output() != output
        if not running or time.monotonic() > deadline:
            job.kill()
            raise AssertionError(f"no {times} x {text!r} in {output}")
        time.sleep(0.02)


def observe(case: Case, job: RunningJob, timeout: float = 120) -> Outcome:
    """Let a job of two ranks fail, and wait for its end.

    Parameters
    ----------
    case : Case
    job : RunningJob
        Of the script, which has been told the name of the case.
    timeout : float
        Seconds after which the job is ended from outside.
    """
    wait_for(job, "failing\n", 1, timeout)
    if case.to_mpiexec is not None:
        time.sleep(0.5)  # so that the ranks are inside of MPI
        job.process.send_signal(case.to_mpiexec)
    start = time.monotonic()
    while job.process.poll() is None and time.monotonic() < start + timeout:
        time.sleep(0.02)
    seconds = time.monotonic() - start
    return Outcome(seconds, job.wait(0.1 if job.process.poll() is None else timeout))


def check(case: Case, outcome: Outcome, hosts: tuple[str, str], rank: int = 1) -> None:
    """Check that a job has ended by itself as it has to, however long it took.

    Parameters
    ----------
    case : Case
    outcome : Outcome
    hosts : tuple of str
        Of the two ranks.
    rank : int
        The one that has failed.

    Raises
    ------
    AssertionError
        If it has not.
    """
    result, other = outcome.result, 1 - rank
    assert not result.timed_out, result
    assert result.returncode != 0, result
    assert result.left_behind == [], result
    names = {"rank": rank, "host": hosts[rank], "other": other, "other_host": hosts[other]}
    for text in case.texts:
        assert text.format(**names) in result.stderr, (text.format(**names), result.stderr)
