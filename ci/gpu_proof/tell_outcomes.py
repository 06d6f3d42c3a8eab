"""A pytest plug-in that writes the outcome of each test to a file as soon as the test ends.

If pytest is killed, the file has all outcomes up to then. The plug-in also shortens the time
limits of tests on ranks: if a GPU hangs, each of these many tests waits for it once.
"""

from __future__ import annotations

import json
import os
from typing import TextIO

import pytest

from ci.gpu_proof.verdicts import FILE

#: Seconds for a test on ranks. The first tests also compile kernels.
SECONDS_ON_RANKS = 40.0


def pytest_configure(config: pytest.Config) -> None:
    """Register the plug-in, except in the processes of xdist, which report to this one."""
    if FILE in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Teller(open(os.environ[FILE], "a")))  # noqa: SIM115


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests on ranks less time. Their pool ends them, because pytest-timeout cannot."""
    for item in items:
        if (marker := item.get_closest_marker("mpi")) is not None:
            seconds = min(SECONDS_ON_RANKS, marker.kwargs.get("timeout", SECONDS_ON_RANKS))
            item.add_marker(pytest.mark.mpi(*marker.args, timeout=seconds), append=False)
            item.add_marker(pytest.mark.timeout(0))


class Teller:
    """Writes a line for each test that ends, and for each file that cannot be collected."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of a test once: after it ran, or when it cannot run."""
        if report.when == "call" or not report.passed:
            self._tell(report)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the names of tests that are only collected."""
        if session.config.option.collectonly:
            for item in session.items:
                told = {"test": item.nodeid, "outcome": "skipped", "reason": "only collected"}
                self._write(told)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write files that cannot be collected."""
        if report.failed:
            self._tell(report)

    def _tell(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        self._write({"test": report.nodeid, "outcome": report.outcome, "reason": reason})

    def _write(self, told: dict[str, str]) -> None:
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()
