"""Shared by the tests: the plugin for tests on several ranks, and the app's modules."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import pytest

import chainermn
from chainermn.testing.modules import import_modules

HERE = Path(__file__).resolve().parent
NAMES = ["data", "model", "predict", "train", "train_dual_parallel", "train_model_parallel"]
NAMES += ["train_single"]

if "chainermn.testing.pytest_plugin" not in sys.modules:  # in a copy of this folder
    pytest_plugins = ["chainermn.testing.pytest_plugin"]


@pytest.fixture(scope="session")
def app() -> SimpleNamespace:
    """Import the app's modules so that another app's may have the same names."""
    return import_modules(HERE, NAMES)


@pytest.fixture(scope="session")
def run() -> Callable[..., None]:
    """Return a function that calls a script's ``main`` until it has ended on all ranks."""

    def call(main: Callable[[list[str]], object], *options: object) -> None:
        main(list(map(str, options)))
        chainermn.create_communicator().allgather_obj(None)

    return call
