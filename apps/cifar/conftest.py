"""Shared fixtures: the app's modules, and jobs."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import pytest

from chainermn.testing.modules import import_modules
from chainermn.testing.mpiexec import JobResult, run_job

HERE = Path(__file__).resolve().parent
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600
NAMES = ["data", "model", "predict", "search_reports", "shapes", "study", "training"]

# If other programs use the cores too, BLAS threads spend much time waiting for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def app() -> SimpleNamespace:
    """Import the app's modules so that another app's may have the same names."""
    return import_modules(HERE, NAMES)


@pytest.fixture(scope="session")
def start() -> Callable[..., JobResult]:
    """Return a function that runs a script under mpiexec until it ends."""

    def run(
        ranks: int, script: Path | str, *options: object, cwd: Path, fails: bool = False
    ) -> JobResult:
        env = ONE_THREAD if ranks == 1 else {}  # with more ranks, the library divides the cores
        arguments = [HERE / script, *map(str, options)]
        return run_job(ranks, arguments, cwd=cwd, env=env, timeout=LIMIT).check(fails=fails)

    return run


@pytest.fixture(scope="session")
def read_log() -> Callable[[Path], list[dict[str, float]]]:
    """Return a function that reads the log in a folder."""
    return lambda out: json.loads((out / "log").read_text())
