"""Property tests on several ranks, a stand-in for a GPU, and an mpiexec that tests choose."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.errors import UnsatisfiedAssumption

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.launch import mpiexec
from chainermn.transport.gpu import device

# Each seed draws different examples.
SEED = os.environ.get("CHAINERMN_RANDOM_SEED", "0")

# No example may depend on a clock or on an earlier run: both can differ between ranks.
hypothesis.settings.register_profile(
    "same on all ranks",
    database=None,
    deadline=None,
    max_examples=30,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,  # one communicator serves all examples
    ],
)
hypothesis.settings.load_profile("same on all ranks")


class WrongExample(BaseException):
    """An error that ends a property test; Hypothesis would retry others, on one rank alone."""


def ends_at_once(test: Callable[..., None]) -> Callable[..., None]:
    """Return a test that ends at its first failure and shows the example."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except UnsatisfiedAssumption:
            raise
        except (Exception, pytest.fail.Exception) as error:
            example = "\n".join(f"    {name} = {value!r}" for name, value in kwargs.items())
            raise WrongExample(f"{error}\nThe example:\n{example}") from error

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make property tests end at the first example that fails."""
    # Once per function, even if a test has several sets of parameters.
    for function in {getattr(item, "function", None) for item in items}:
        if hasattr(function, "hypothesis"):
            function.hypothesis.inner_test = ends_at_once(function.hypothesis.inner_test)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make property tests draw the same examples on all ranks."""
    function = getattr(item, "function", None)
    if hasattr(function, "hypothesis"):
        hypothesis.seed(f"{SEED} {item.nodeid}")(function)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to repeat failed property tests."""
    failed = terminalreporter.stats.get("failed", ())
    if any("hypothesis" in report.keywords for report in failed):
        terminalreporter.write_line(
            f"Property tests drew their examples by CHAINERMN_RANDOM_SEED={SEED}."
        )


@pytest.fixture
def comm() -> CommunicatorBase:
    return chainermn.create_communicator("naive")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give chainermn a stand-in for a GPU: see without_gpu/stand_in_gpu.py."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "without_gpu")
    import stand_in_gpu

    found = stand_in_gpu.StandInGpu()
    device.use(found)
    yield found
    device.use(None)
    assert not found.memory.races


@pytest.fixture
def forgets_mpiexec() -> Iterator[None]:
    """Make this test, and those after it, look for mpiexec and its MPI again."""
    cached = (mpiexec.find_mpiexec, mpiexec.mpi4py_library, mpiexec.mpiexec_version)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture(scope="session")
def flavor() -> str:
    """Return the name of the MPI that mpi4py loads, whatever mpiexec there is."""
    return "mpich" if "MPICH" in mpiexec.mpi4py_library() else "openmpi"


@pytest.fixture
def only_mpiexec(
    forgets_mpiexec: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Return a function that makes a shell script the only mpiexec to be found."""
    folder = tmp_path / "only"
    folder.mkdir()
    monkeypatch.setattr(mpiexec.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setenv("PATH", str(folder))

    def put(script: str) -> Path:
        path = folder / "mpiexec"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return put
