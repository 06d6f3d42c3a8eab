"""Shared by the tests: the plugin for tests on several ranks, and the app's modules."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import pytest

from chainermn.testing.modules import modules_of

HERE = Path(__file__).resolve().parent
NAMES = ["data", "evaluation", "generate", "model", "reports", "train", "updater"]

if "chainermn.testing.pytest_plugin" not in sys.modules:  # in a copy of this folder
    pytest_plugins = ["chainermn.testing.pytest_plugin"]


@pytest.fixture(scope="module")
def app() -> Iterator[SimpleNamespace]:
    """Import the app's modules, while another app's may have the same names."""
    with modules_of(HERE, NAMES) as modules:
        yield modules
