"""Processes that a test has started and may have left behind."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

from chainermn.testing.mpiexec import processes_with


class Started:
    """Processes started with its ``environment``, which marks them with a unique variable."""

    def __init__(self) -> None:
        self._mark = f"TEST_{uuid.uuid4().hex}"
        self.environment = {**os.environ, self._mark: "1"}

    def processes(self) -> list[psutil.Process]:
        return processes_with(self._mark, "1")


@pytest.fixture
def started() -> Iterator[Started]:
    """Return an object that marks and finds processes; kill any that are left."""
    marked = Started()
    yield marked
    for process in marked.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool]], bool]:
    """Return a function that waits until a condition holds, even on a busy machine."""

    def wait(true: Callable[[], bool], seconds: float = 120) -> bool:
        deadline = time.monotonic() + seconds
        while not true() and time.monotonic() < deadline:
            time.sleep(0.05)
        return true()

    return wait
