"""Run what pages show on ranks: those of a test, or of a job of its own.

A script that hangs fails the test with its output and stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import psutil
import pytest
from chainer import config, using_config

from chainermn.notes import without_notes
from chainermn.testing.modules import modules_of
from chainermn.testing.mpiexec import Job

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
#: Seconds after which a job or a shell counts as hung, even on a busy machine.
LIMIT = 400
#: Runs a test on ranks, as ``pytest.mark.mpi`` does.
mpi = partial(pytest.mark.mpi, timeout=LIMIT)
#: Part of this time that is left for showing where it hangs.
SECONDS_FOR_STACKS = 20


def lines_here(script: str | Path, *arguments: str | Path) -> list[str]:
    """Run a script on all ranks of this test; return what they print, sorted, on each of them."""
    return lines_of(lambda: run_script(script, *arguments))


def lines_of(run: Callable[[], object]) -> list[str]:
    """Call a function on all ranks of this test; return what they print, sorted, on each of them.

    Only notes may be written to standard error.
    """
    from mpi4py import MPI

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with streams[0], streams[1], using_config("debug", config.debug):
            run()
        faulthandler.unregister(signal.SIGUSR2)  # in case it would write there
        printed, warned = (stream.seek(0) or stream.read() for stream in (out, err))
    assert without_notes(warned) == ""
    texts = MPI.COMM_WORLD.allgather(printed)
    return sorted(line for text in texts for line in text.splitlines())


def run_script(script: str | Path, *arguments: str | Path) -> None:
    """Run a script as Python does, in this process."""
    before = sys.argv
    sys.argv = [str(script), *map(str, arguments)]
    with modules_of(Path(script).resolve().parent):
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.argv = before


def run_on_ranks(ranks: int, *arguments: str | Path, cwd: Path):
    """Run a script in a job; return how the job ended, and what the ranks print, sorted.

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


def lines_of_job(ranks: int, *arguments: str | Path, cwd: Path) -> list[str]:
    """Run a script that succeeds in a job; return what its ranks print, sorted."""
    job, lines = run_on_ranks(ranks, *arguments, cwd=cwd)
    assert (job.returncode, job.stderr) == (0, ""), (job, lines)
    return lines


def described(processes: Iterable[psutil.Process]) -> str:
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(f"{process.pid} {process.status()} {' '.join(process.cmdline())}\n")
    return "".join(lines)
