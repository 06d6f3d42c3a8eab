#!/usr/bin/env python3
"""Do everything that needs a GPU in one call, and write docs/results/proof_on_gpu.md.

Runs the tests for GPUs, the doctor, the apps with --gpu and the benchmarks, with the Python that
runs this script, in which everything has to be installed: ``nox --no-venv`` does the same in
parts. It takes less than 10 minutes: tasks that do not end in their time are ended, and the page
says so. It exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("libs/chainer_compat/tests/gpu", "libs/chainermn/tests/gpu")
LINES_SHOWN = 30


@dataclass(frozen=True)
class Task:
    """A command, and how long it may run.

    Attributes
    ----------
    title : str
    command : sequence of str
        Arguments of Python.
    seconds : float
    is_tests : bool
    """

    title: str
    command: Sequence[str]
    seconds: float
    is_tests: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a task ended."""

    task: Task
    code: int | None
    output: str
    seconds: float

    @property
    def verdict(self) -> str:
        """Return a word or two for the table."""
        if self.code is None:
            return f"**not done within {self.task.seconds:g} s**"
        word = "good" if self.code == 0 else f"**failed** (exit code {self.code})"
        # With pytest's counts: tests that were skipped have proved nothing.
        counts = self.output.strip().splitlines()[-1:] if self.task.is_tests else []
        return ": ".join([word, *counts])


def launch(ranks: int, *arguments: str) -> list[str]:
    return ["-m", "chainermn", "launch", "-n", str(ranks), *arguments]


def tasks(ranks: int, out: Path) -> list[Task]:
    """Return the tasks, the most telling first."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-W", "default"]
    mnist, imagenet, seq2seq = (
        [f"apps/{app}/train.py", "--epoch", epochs, "--gpu", "--out", str(out / app)]
        for app, epochs in (("mnist", "5"), ("imagenet", "1"), ("seq2seq", "1"))
    )
    benchmarks = ["-m", "benchmarks", "gpu", "--rounds", "3"]
    return [
        Task("chainermn doctor", ["-m", "chainermn", "doctor", "-n", str(ranks)], 50),
        Task("tests of transports and communicators", [*pytest, TESTS[1]], 180, True),
        Task("tests of Chainer's functions and links", [*pytest, TESTS[0]], 80, True),
        Task("benchmarks", benchmarks, 130),
        Task("apps/mnist", launch(ranks, *mnist), 40),
        Task("apps/imagenet", launch(ranks, *imagenet), 50),
        Task("apps/seq2seq", launch(ranks, *seq2seq), 50),
    ]


def run(task: Task) -> Outcome:
    """Run a task until it ends or its time is over."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *task.command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: int | None
    try:
        output, _ = process.communicate(timeout=task.seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        output, code = end(process), None
    return Outcome(task, code, output, time.monotonic() - start)


def end(process: subprocess.Popen[str]) -> str:
    """End a process and its children; return its output."""
    process.terminate()  # lets mpiexec end its ranks
    try:
        output, _ = process.communicate(timeout=8)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output


def why_no_gpu() -> str:
    """Return why there is nothing to try; empty if there is a GPU."""
    code = (
        "import chainer; from chainermn.transport.gpu.available import why_no_nccl; "
        "print(why_no_nccl() or '')"
    )
    return run(Task("GPU", ["-c", code], 30)).output.strip()


def describe_machine() -> list[str]:
    """Return lines that name the GPUs, the driver and the versions."""
    code = (
        "import platform, cupy, numpy, mpi4py.MPI as MPI; from cupy.cuda import nccl, runtime; "
        "print('Python', platform.python_version(), '- CuPy', cupy.__version__, '- CUDA', "
        "runtime.runtimeGetVersion(), '- driver', runtime.driverGetVersion(), '- NCCL', "
        "nccl.get_version() if nccl.available else None, '- NumPy', numpy.__version__, '-', "
        "MPI.Get_library_version().splitlines()[0]); "
        "print(*(runtime.getDeviceProperties(i)['name'].decode() "
        "for i in range(runtime.getDeviceCount())), sep=', ')"
    )
    return run(Task("versions", ["-c", code], 30)).output.strip().splitlines()


def write(outcomes: Sequence[Outcome], machine: Sequence[str], page: Path) -> None:
    """Write the verdicts and the ends of the outputs."""
    command = f"    python {Path(__file__).relative_to(ROOT)}"
    lines = ["# Run on a GPU", "", *machine, "", command, "", "| | | seconds |", "|---|---|---:|"]
    lines += [f"| {o.task.title} | {o.verdict} | {o.seconds:.0f} |" for o in outcomes]
    for outcome in outcomes:
        shown = outcome.output.strip().splitlines()[-LINES_SHOWN:]
        lines += ["", f"## {outcome.task.title}", "", "```", *shown, "```"]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=1, help="default: %(default)s; one per GPU")
    arguments = parser.parse_args()
    if reason := why_no_gpu():
        sys.exit(f"nothing can be tried here: {reason}")
    machine = describe_machine()
    print(*machine, sep="\n", flush=True)
    outcomes = []
    with tempfile.TemporaryDirectory() as out:
        for task in tasks(arguments.ranks, Path(out)):
            outcomes.append(run(task))
            print(f"{task.title}: {outcomes[-1].verdict}", flush=True)
    write(outcomes, machine, ROOT / "docs/results/proof_on_gpu.md")
    sys.exit(any(outcome.code != 0 for outcome in outcomes))


if __name__ == "__main__":
    main()
