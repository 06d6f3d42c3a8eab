"""Shared fixtures: the app's modules, small data sets, and jobs."""

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
NAMES = ["data", "evaluation", "export", "generated", "idx", "ilsvrc", "images", "layouts"]
NAMES += ["lr_range", "models", "options", "predict", "prepare", "shard_iterator", "shards"]
NAMES += ["train", "trained", "training", "weights"]

# If other programs use the cores too, BLAS threads spend much time waiting for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def app() -> SimpleNamespace:
    """Import the app's modules so that another app's may have the same names."""
    return import_modules(HERE, NAMES)


@pytest.fixture(scope="session")
def drawn(app, tmp_path_factory) -> Path:
    """Return a folder with 600 images to train on and 101 to validate with."""
    root = tmp_path_factory.mktemp("data") / "drawn"
    app.generated.create(root, 600, 101)
    return root


@pytest.fixture(scope="session")
def drawn_lists(drawn) -> list[str | Path]:
    """Return the options of scripts that name the drawn images."""
    return lists(drawn)


def lists(root: Path) -> list[str | Path]:
    return ["--train", root / "train.txt", "--val", root / "val.txt", "--root", root]


@pytest.fixture(scope="session")
def start() -> Callable[..., JobResult]:
    """Return a function that runs a script of the app under mpiexec until it ends."""

    def run(ranks: int, script: str, *options: object, cwd: Path, **outcome: bool) -> JobResult:
        env = ONE_THREAD if ranks == 1 else {}  # with more ranks, the library divides the cores
        arguments = [HERE / script, *map(str, options)]
        return run_job(ranks, arguments, cwd=cwd, env=env, timeout=LIMIT).check(**outcome)

    return run


@pytest.fixture(scope="session")
def train(start) -> Callable[..., JobResult]:
    """Return a function that trains the small network on a data set."""

    def run(ranks: int, root: Path, out: Path, *options: object, **outcome: bool) -> JobResult:
        arguments = [*lists(root), "--out", out, "--arch", "small", *options]
        return start(ranks, "train.py", *arguments, cwd=out.parent, **outcome)

    return run


# Runs the script named in its arguments, and kills rank 1 after a number of iterations.
KILLS_ITSELF = """
import os, runpy, signal, sys
from chainer.training import StandardUpdater

if __name__ == "__main__":
    update, last = StandardUpdater.update, int(sys.argv[1])

    def update_or_die(self):
        update(self)
        optimizer = self.get_optimizer("main")
        if self.iteration == last and optimizer.communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    StandardUpdater.update = update_or_die
    del sys.argv[:2]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="session")
def kills_itself(tmp_path_factory) -> Path:
    """Return a script that takes an iteration, another script, and that script's options."""
    path = tmp_path_factory.mktemp("kills_itself") / "kills_itself.py"
    path.write_text(KILLS_ITSELF)
    return path
