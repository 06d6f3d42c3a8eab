"""Shared fixtures: the app's modules, and calls of its scripts on all ranks of a test."""

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import pytest

from chainermn.testing.modules import modules_of

HERE = Path(__file__).resolve().parent
NAMES = ["data", "formats", "model", "predict", "search", "search_reports", "shapes"]
NAMES += ["study", "train", "training"]


if "chainermn.testing.pytest_plugin" not in sys.modules:  # in a copy of this folder
    pytest_plugins = ["chainermn.testing.pytest_plugin"]


@pytest.fixture(scope="module")
def app() -> Iterator[SimpleNamespace]:
    """Import the app's modules, while another app's may have the same names."""
    with modules_of(HERE, NAMES) as modules:
        modules.shapes.draw = functools.cache(modules.shapes.draw)
        modules.data.TEST_SHAPES //= 10  # few enough to draw quickly
        yield modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder of all ranks, for all tests of a module on this number of ranks."""
    from mpi4py import MPI

    return Path(MPI.COMM_WORLD.bcast(tmp_path_factory.mktemp("folder")))


@pytest.fixture(scope="session")
def call() -> Callable[..., str]:
    """Return a function that calls a script's main, and returns what this rank prints."""

    def run(main: Callable, *options: object) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert not main(list(map(str, options)))
        return shown.getvalue()

    return run


@pytest.fixture
def call_quietly(capfd, monkeypatch) -> Callable[..., None]:
    """Return a function that calls a main with ``--quiet`` and fails if it prints anything."""

    def run(main: Callable, *options: object) -> None:
        with open(1, "w", closefd=False) as stream:  # pytest's own does not use the descriptor
            monkeypatch.setattr(sys, "stdout", stream)
            print("before")
            assert not main([*map(str, options), "--quiet"])
            print("after")
        assert capfd.readouterr().out == "before\n"

    return run


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """Return a function that calls a main that ends every rank, and returns its message."""
    from mpi4py import MPI

    def run(main: Callable, *options: object) -> str:
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
            main(list(map(str, options)))
        message, *others = MPI.COMM_WORLD.allgather(end.value.code)
        assert others == [1] * len(others)
        assert message.startswith("error: ")
        assert message.count("error: ") == 1
        return message

    return run


@pytest.fixture(scope="session")
def read_log() -> Callable[[Path], list[dict[str, float]]]:
    """Return a function that reads the log in a folder."""
    return lambda out: json.loads((out / "log").read_text())
