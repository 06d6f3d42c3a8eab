"""The tasks of ``ci/prove_on_gpu.py``, the most informative first."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

COMPUTE, FAST, RANKS = (
    f"libs/{lib}/tests/gpu" for lib in ("chainer_compat", "chainer_fast", "chainermn")
)
APPS = Path(__file__).resolve().parents[2] / "apps"
TEST_SECONDS = 20
#: Parts of the titles of `benchmarks.gpu`: each selects a measurement.
MEASURED = ("idle", "iteration, ResNet-50", "iteration, conv net", "gather", "kernel", "exchange")
WITH_GRAPHS = tuple(
    f"graphs, {what}"
    for what in (
        "MLP",
        "ResNet-50, mixed precision, batch 64",
        "conv net",
        "ResNet-50, mixed precision, batch 256",
    )
)

# Tests on ranks that have a task of their own.
_KERNELS, _TIMELINE = "(batched_copy or kernel)", "test_timeline"
_OVERLAP, _BUFFERS = "overlap", "double_buffering"
_MISSING = "missing_from_nccl"
_GRAPHS, _STEPS_OF_RANKS = "(graphs or recordable)", "test_recorded_steps"
_CHANNELS_LAST = "test_channels_last"
_SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"


class Lane(Enum):
    """Lane of a task. Lanes run at the same time, and the tasks of a lane one after the other."""

    RANKS = "ranks"
    COMPUTE = "compute"
    APPS = "apps"
    ALONE = "alone"  # after all others


@dataclass(frozen=True)
class Task:
    """Commands that prove one thing.

    Attributes
    ----------
    name, title : str
    commands : sequence of sequence of str
        Arguments of Python.
    seconds : float
        Time limit for all commands together.
    lane : Lane
    under : sequence of str
        Program that runs Python, with its arguments.
    needs_own_nccl : bool
        Whether the task needs an NCCL that allows several ranks on one GPU.
    writes : str
        File in the folder for outputs. It is kept, and without it nothing is proved.
    rehearsed : sequence of sequence of str, optional
        Commands to run if there is no GPU. By default, tests are only collected.
    """

    name: str
    title: str
    commands: Sequence[Sequence[str]]
    seconds: float
    lane: Lane = Lane.RANKS
    under: Sequence[str] = ()
    needs_own_nccl: bool = False
    writes: str = ""
    rehearsed: Sequence[Sequence[str]] | None = None

    @property
    def is_tests(self) -> bool:
        """Return whether outcomes of tests decide, not only the exit code."""
        return "pytest" in self.commands[0]

    def rehearsal(self) -> Sequence[Sequence[str]]:
        """Return the commands to run if there is no GPU."""
        if self.rehearsed is not None:
            return self.rehearsed
        more = ["--collect-only", "-q"] if self.is_tests else []
        return [[*command, *more] for command in self.commands]


def tests(
    *selection: str, only: str = "", ranks: Sequence[int] = (), seconds: float = TEST_SECONDS
) -> list[str]:
    """Return arguments of Python that run some of the tests, with a time limit for each."""
    command = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu"]
    # CuPy's warnings are not our faults.
    command += ["-W", "default", "-p", "ci.gpu_proof.tell_outcomes", f"--timeout={seconds}"]
    # No signal interrupts a CUDA call that hangs. At least its stacks are printed.
    command += ["-o", f"faulthandler_timeout={0.75 * seconds:g}"]
    command += ["-k", only] if only else []
    # After a failure, ranks start again. Many failures would leave no time for other tests.
    command += ["--maxfail=10"] if RANKS in selection else []
    return [*command, *(f"--mpi-ranks={number}" for number in ranks), *selection]


def every_test() -> list[str]:
    """Return arguments of Python that list all tests for GPUs."""
    quiet = ["-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-W", "default"]
    return [*quiet, "--collect-only", "-q", "--color=no", COMPUTE, FAST, RANKS, str(APPS)]


def on_one_and_more(only: str) -> list[list[str]]:
    """Return tests on one rank, then on several ranks that share the GPU without NCCL."""
    return [
        tests(RANKS, only=only, ranks=[1]),
        tests(RANKS, only=f"({only}) and not nccl", ranks=[2, 3, 4]),
    ]


def tasks(out: str, processes: int) -> list[Task]:
    """Return the tasks.

    Parameters
    ----------
    out : str
        Folder for outputs.
    processes : int
        Number of processes for tests on one rank.
    """
    return [*on_ranks(), *on_one_rank(processes), *alone(out)]


def on_ranks() -> Iterator[Task]:
    """Yield the tasks for the library on one GPU, the most basic first."""
    start = "import chainermn; print(chainermn.create_communicator('naive').rank)"
    launch = ["-m", "chainermn", "launch", "-n", "2", sys.executable, "-c", start]
    yield Task("ranks", "two ranks start", [launch], 40)
    kernels = tests(RANKS, only=_KERNELS, ranks=[1])
    yield Task("kernels", "kernels that copy gradients", [kernels], 60, rehearsed=[kernels])
    transports = "test_transports and not batched_copy"
    by_mpi = tests(RANKS, only=f"{transports} and not nccl")
    title = "transports by MPI, on 1 to 3 ranks"
    yield Task("transports", title, [by_mpi], 60, rehearsed=[by_mpi])
    by_nccl = tests(RANKS, only=f"{transports} and nccl", ranks=[1])
    yield Task("nccl", "NCCL on one rank", [by_nccl], 50)
    own = ("test_transports", _KERNELS, _TIMELINE, _OVERLAP, _BUFFERS, _MISSING, _STEPS_OF_RANKS)
    rest = [f"not {name}" for name in own]
    title = "communicators, functions, links, compression"
    yield Task("communicators", title, on_one_and_more(" and ".join(rest)), 140)
    yield Task("overlap", "overlap", on_one_and_more(_OVERLAP), 60)
    yield Task("double_buffering", "double buffering", on_one_and_more(_BUFFERS), 60)
    yield Task("timeline", "timelines", on_one_and_more(_TIMELINE), 50)
    # Check memory accesses only: CuPy tries some API calls that may fail.
    checked = [shutil.which("compute-sanitizer") or _SANITIZER, "--tool", "memcheck"]
    checked += ["--report-api-errors", "no", "--error-exitcode", "86"]
    slowly = tests(RANKS, only=_KERNELS, ranks=[1], seconds=80)
    yield Task("sanitizer", "kernels under compute-sanitizer", [slowly], 90, under=checked)
    yield Task("doctor", "chainermn doctor", [["-m", "chainermn", "doctor", "-n", "1"]], 50)


def on_one_rank(processes: int) -> Iterator[Task]:
    """Yield the tasks for Chainer and the apps on one rank."""
    together = ["-n", str(processes)] if processes > 1 else []
    graphs = [
        tests(*together, FAST, only=_GRAPHS, seconds=60),
        tests(RANKS, only=_STEPS_OF_RANKS, ranks=[1]),
    ]
    title = "CUDA graphs: the numbers of eager steps, and what falls back"
    yield Task("graphs", title, graphs, 120, Lane.COMPUTE)
    last = [tests(*together, FAST, only=_CHANNELS_LAST, seconds=120)]
    title = "channels last: kernels, functions, and the first losses of ResNet-50"
    yield Task("channels_last", title, last, 150, Lane.COMPUTE)
    computes = tests(*together, COMPUTE)
    title = "Chainer's functions and links"
    yield Task("compute", title, [computes], 150, Lane.COMPUTE, rehearsed=[computes])
    fast = tests(*together, FAST, only=f"not {_GRAPHS} and not {_CHANNELS_LAST}")
    title = "cuDNN, and kernels faster than Chainer's"
    yield Task("cudnn", title, [fast], 150, Lane.COMPUTE, rehearsed=[fast])
    # Other tests of the apps import packages that may be missing.
    files = [path for path in sorted(APPS.glob("*/test_*.py")) if "mark.gpu" in path.read_text()]
    apps = tests(*together, *map(str, files), seconds=150)
    yield Task("apps", "apps with --gpu", [apps], 250, Lane.APPS, rehearsed=[apps])


def alone(out: str) -> Iterator[Task]:
    """Yield the tasks that fill the GPU, or that other tasks would disturb."""
    measure = ["-m", "benchmarks", "gpu", "--rounds", "3", "--output", f"{out}/results"]
    results = "results/raw/gpu-mpich.json"
    # One at a time: each saves its results when it ends.
    graphs = [[*measure, "--only", what] for what in WITH_GRAPHS]
    title = "times with CUDA graphs"
    quick = [[*measure, "--quick"]]
    yield Task("graph_times", title, graphs, 210, Lane.ALONE, writes=results, rehearsed=quick)
    by_nccl = f"nccl or {_STEPS_OF_RANKS}"
    shared = [tests(RANKS, only=by_nccl, ranks=[2]), tests(RANKS, only=by_nccl, ranks=[3, 4])]
    title = "NCCL on several ranks, which may share a GPU"
    yield Task("shared_gpu", title, shared, 100, Lane.ALONE, needs_own_nccl=True)
    missing = [tests(RANKS, only=_MISSING, seconds=60)]
    title = "a rank fails while the other waits for NCCL"
    yield Task("missing", title, missing, 100, Lane.ALONE, needs_own_nccl=True)
    mnist = ["-m", "chainermn", "launch", "-n", "2", "apps/mnist/train.py"]
    # `flat` uses MPI. The others use NCCL inside a host, which ranks on one GPU must enable.
    mnist += ["--communicator", "flat", "--out", f"{out}/mnist"]
    trained, rehearsed = [*mnist, "--gpu", "--epoch", "5"], [*mnist, "--epoch", "1"]
    title = "apps/mnist with --gpu and --communicator flat, on two ranks"
    yield Task("two_ranks", title, [trained], 50, Lane.ALONE, rehearsed=[rehearsed])
    measured = [[*measure, "--only", what] for what in MEASURED]
    title = "benchmarks"
    yield Task("benchmarks", title, measured, 300, Lane.ALONE, writes=results, rehearsed=quick)
