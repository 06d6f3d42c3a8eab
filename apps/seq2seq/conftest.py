"""Shared fixtures: the app's modules, small text files, and jobs."""

import json
import os
import subprocess
import sys
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
NAMES = ["batches", "catalogs", "corpus", "evaluation", "files", "generated", "index", "models"]
NAMES += ["models.transformer", "neighbors", "prepare", "saved", "subwords"]
NAMES += ["training", "translate", "vocabulary"]

# If other programs use the cores too, BLAS threads spend much time waiting for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def app() -> SimpleNamespace:
    """Import the app's modules so that another app's may have the same names."""
    return import_modules(HERE, NAMES)


@pytest.fixture(scope="session")
def start() -> Callable[..., JobResult]:
    """Return a function that runs a script of the app under mpiexec until it ends."""

    def run(
        ranks: int, script: Path | str, *options: object, cwd: Path, **outcome: bool
    ) -> JobResult:
        env = ONE_THREAD if ranks == 1 else {}  # with more ranks, the library divides the cores
        arguments = [HERE / script, *map(str, options)]
        return run_job(ranks, arguments, cwd=cwd, env=env, timeout=LIMIT).check(**outcome)

    return run


@pytest.fixture(scope="session")
def train(start) -> Callable[..., JobResult]:
    """Return a function that trains, with results in the folder ``out``."""

    def run(
        ranks: int, out: Path, *options: object, script: str = "train.py", **outcome: bool
    ) -> JobResult:
        return start(ranks, script, "--out", out, *options, cwd=out.parent, **outcome)

    return run


@pytest.fixture(scope="session")
def run_script() -> Callable[..., str]:
    """Return a function that runs a script of the app without MPI and returns what it prints."""

    def run(script: str, *options: object, text: str = "", fails: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, HERE / script, *map(str, options)],
            input=text.encode(),
            env={**os.environ, **ONE_THREAD},
            capture_output=True,
            timeout=LIMIT,
        )
        if fails:
            assert done.returncode != 0, done
            return done.stderr.decode()
        assert (done.returncode, done.stderr) == (0, b""), done
        return done.stdout.decode()

    return run


@pytest.fixture(scope="session")
def read_log() -> Callable[[Path], list[dict[str, float]]]:
    """Return a function that reads the log in a folder."""
    return lambda out: json.loads((out / "log").read_text())


@pytest.fixture(scope="session")
def dates(app, tmp_path_factory) -> tuple[Path, Path]:
    """Return two files with an odd number of lines."""
    folder = tmp_path_factory.mktemp("dates")
    paths = folder / "dates.source", folder / "dates.target"
    app.generated.write(*paths, 203, 1)
    return paths
