"""Program of the ranks of a `RankPool`: a pytest session that gets its tests from a socket.

``python -m chainermn.testing.rank_worker SOCKET [pytest arguments]``
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

PLUGIN_NAME = "chainermn-rank-worker"

# Seconds after the time limit when the rank ends itself, should the pool be gone.
_GRACE_WITHOUT_POOL = 30.0


class RankWorker:
    """Replaces pytest's loop over the tests by one that takes orders from the pool."""

    def __init__(self, connection: Connection) -> None:
        self.__name__ = PLUGIN_NAME  # under which pytest registers it
        self._connection = connection
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that the pool names, until it says stop or is gone."""
        if session.testsfailed:
            raise session.Interrupted("errors during collection")
        # It has shown errors of the collection; from here on the pool shows them.
        session.config.pluginmanager.unregister(name="terminalreporter")
        items = {item.nodeid: item for item in session.items}
        self._connection.send("ready")
        while True:
            try:
                order = self._connection.recv()
            except EOFError:
                os._exit(1)
            if order is None:
                return True
            nodeid, limit = order
            faulthandler.dump_traceback_later(limit + _GRACE_WITHOUT_POOL, exit=True)
            self._connection.send(self._run(items[nodeid]))
            faulthandler.cancel_dump_traceback_later()

    def _run(self, item: pytest.Item) -> tuple[str, list[dict[str, Any]]]:
        self._reports.clear()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        outcomes = {report.outcome for report in self._reports}
        status = next((o for o in ("failed", "skipped") if o in outcomes), "passed")
        serialise = item.config.hook.pytest_report_to_serializable
        return status, [serialise(config=item.config, report=report) for report in self._reports]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep pytest's reports of the running test."""
        self._reports.append(report)


def main(address: Path, arguments: list[str]) -> int:
    """Run the tests that the pool at this address names."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    directory = address.parent
    stack = (directory / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    client = socket.socket(socket.AF_UNIX)
    with contextlib.chdir(directory):
        client.connect(address.name)
    connection = Connection(client.detach())
    connection.send((rank, os.getpid()))
    # Capturing only sys lets MPI's own messages through.
    private = ["-p", "no:cacheprovider", "--no-header", "-q", "--capture=sys"]
    basetemp = ["--basetemp", str(directory / f"tmp{rank}")]
    return int(pytest.main([*private, *basetemp, *arguments], plugins=[RankWorker(connection)]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
