"""Run scripts on ranks. If one hangs, the test fails with its output and stacks."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from chainermn.testing.mpiexec import Job

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
#: Seconds after which a job or a shell counts as hung, even on a busy machine.
LIMIT = 400
#: Part of this time that is left for showing where it hangs.
SECONDS_FOR_STACKS = 20


def run_on_ranks(ranks: int, *arguments: str | Path, cwd: Path):
    """Run a script on some ranks; return how the job ended, and what they print, sorted.

    A script that hangs fails the test with what it has printed, its processes and their stacks.
    """
    output = cwd / "output"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    limits = [output, str(LIMIT - SECONDS_FOR_STACKS)]
    job = Job(ranks, [HERE / "print_into.py", *limits, *arguments], cwd=cwd)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(timeout=LIMIT)
    alive = described(job.processes()) if job.process.poll() is None else ""
    result = job.wait(timeout=10)
    lines = sorted(line for file in output.iterdir() for line in file.read_text().splitlines())
    if alive:
        pytest.fail(f"not over after {LIMIT} s, ranks printed {lines}\n{alive}{result.stderr}")
    assert not result.timed_out, result
    assert not result.left_behind
    return result, lines


def lines_of_ranks(ranks: int, *arguments: str | Path, cwd: Path) -> list[str]:
    """Run a script that succeeds on some ranks; return what they print, sorted."""
    job, lines = run_on_ranks(ranks, *arguments, cwd=cwd)
    assert (job.returncode, job.stderr) == (0, ""), (job, lines)
    return lines


def described(processes: Iterable[psutil.Process]) -> str:
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(f"{process.pid} {process.status()} {' '.join(process.cmdline())}\n")
    return "".join(lines)
