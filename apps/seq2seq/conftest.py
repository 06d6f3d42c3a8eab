"""Shared fixtures: the app's modules, small text files, and calls of its scripts."""

import contextlib
import gc
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import pytest

from chainermn.testing.modules import modules_of

HERE = Path(__file__).resolve().parent
NAMES = ["batches", "catalogs", "corpus", "evaluate", "evaluation", "generated", "index"]
NAMES += ["models", "models.transformer", "neighbors", "prepare", "saved", "subwords", "train"]
NAMES += ["train_model_parallel", "training", "translate", "vocabulary"]


if "chainermn.testing.pytest_plugin" not in sys.modules:  # in a copy of this folder
    pytest_plugins = ["chainermn.testing.pytest_plugin"]


@pytest.fixture(scope="module")
def app() -> Iterator[SimpleNamespace]:
    """Import the app's modules, while another app's may have the same names."""
    with modules_of(HERE, NAMES) as modules:
        yield modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder of all ranks, for all tests of a module on this number of ranks."""
    from mpi4py import MPI

    return Path(MPI.COMM_WORLD.bcast(tmp_path_factory.mktemp("folder")))


@pytest.fixture(scope="session")
def call() -> Callable[..., str]:
    """Return a function that calls a script's main, and returns what this process prints."""

    def run(main: Callable, *options: object, text: str | bytes = "") -> str:
        content = text.encode() if isinstance(text, str) else text
        shown = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        with contextlib.redirect_stdout(shown), pytest.MonkeyPatch.context() as patch:
            lines = io.BufferedReader(io.BytesIO(content))
            patch.setattr(sys, "stdin", io.TextIOWrapper(lines))
            main(list(map(str, options)))
        return shown.buffer.getvalue().decode()

    return run


@pytest.fixture(scope="session")
def error_of(call) -> Callable[..., str]:
    """Return a function that calls a main that ends its process, and returns the message."""

    def run(main: Callable, *options: object, text: str = "") -> str:
        with pytest.raises(SystemExit) as end:
            call(main, *options, text=text)
        assert end.value.code.startswith("error: ")
        return end.value.code

    return run


@pytest.fixture
def refused(call) -> Iterator[Callable[..., str]]:
    """Return a function that calls a main that ends every rank, and returns its message."""
    from mpi4py import MPI

    def run(main: Callable, *options: object) -> str:
        with pytest.raises(SystemExit) as end:
            call(main, *options)
        message, *others = MPI.COMM_WORLD.allgather(end.value.code)
        assert others == [1] * len(others)
        assert message.startswith("error: ")
        assert message.count("error: ") == 1
        return message

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # files that the exits would close
        yield run
        gc.collect()


@pytest.fixture(scope="session")
def read_log() -> Callable[[Path], list[dict[str, float]]]:
    """Return a function that reads the log in a folder."""
    return lambda out: json.loads((out / "log").read_text())


@pytest.fixture(scope="module")
def dates(app, tmp_path_factory) -> tuple[Path, Path]:
    """Return two files with an odd number of lines. Each rank has its own; rank 0's are read."""
    folder = tmp_path_factory.mktemp("dates")
    paths = folder / "dates.source", folder / "dates.target"
    app.generated.write(*paths, 203, 1)
    return paths
