"""Ranks that keep running between tests.

Starting ``mpiexec`` and importing Chainer takes a second or more per rank, but a test often takes
only milliseconds. A `RankPool` starts its ranks once and gives them one test after another. If a
test fails on any rank, messages may still be on their way, so the next test gets a new pool.

Each rank runs this module: a pytest session (`RankWorker`) with a Unix socket to the pool. So the
pool notices at once if a rank dies, whatever ``mpiexec`` does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from chainermn.process.patience import wait_patiently
from chainermn.testing.mpiexec import Job

WORKER_NAME = "chainermn-rank-worker"

START_LIMIT = 300.0
# Seconds that other ranks have to finish after one has failed; ranks that wait for it never will.
GRACE_AFTER_FAILURE = 2.0
# Seconds after the time limit when a rank ends itself, in case the pool is gone.
_GRACE_WITHOUT_POOL = 300.0
# Makes a rank write its stacks. Scripts that tests call may use SIGUSR1 and SIGUSR2 themselves.
STACK_SIGNAL = signal.SIGXCPU
# Seconds that a rank has to write its stacks; the main thread comes last, and may be cut off.
STACK_LIMIT = 5.0
_ENDS_OF_STACKS = ("in _run_module_as_main", "...")
# Frames of pytest, and those below it, to the end of a thread's stack.
_BELOW_THE_TEST = re.compile(r"^  File .*_pytest.*\n?(  .*\n?)*", re.MULTILINE)


class RankResult(NamedTuple):
    """Result of a test on one rank."""

    rank: int
    status: str
    """``'passed'``, ``'skipped'``, ``'failed'``, ``'hung'`` (still running after its time limit)
    or ``'died'`` (the process is gone)."""
    reports: Sequence[dict[str, Any]] = ()
    """Serialized pytest reports, one per phase; none of a rank that hung or died."""
    stack: str = ""
    """Stacks of all threads of a rank that hung."""


class RankPool:
    """Ranks of one ``mpiexec`` that run tests on request.

    ``pytest_arguments`` are the arguments of the pytest session on each rank, including the test
    files. The current test fails if the ranks do not start.
    """

    def __init__(self, ranks: int, pytest_arguments: Sequence[str]) -> None:
        self.ranks = ranks
        self._directory = Path(tempfile.mkdtemp(prefix="mpi"))
        self._connections: dict[Connection, int] = {}
        self._pids: dict[int, int] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            with contextlib.chdir(self._directory):  # a full path may be too long for a socket
                listener.bind("socket")
            listener.listen(ranks)
            self._job = Job(ranks, ["-m", __name__, self._directory, *pytest_arguments])
            try:
                self._accept(listener)
            except BaseException:
                self.kill()
                raise

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_LIMIT
        listener.settimeout(0.2)
        while len(self._connections) < self.ranks:
            try:
                accepted, _ = listener.accept()
                connection = Connection(accepted.detach())
                rank, self._pids[rank] = connection.recv()
                self._connections[connection] = rank
            except (TimeoutError, EOFError):
                if self._job.process.poll() is not None or time.monotonic() > deadline:
                    self._fail("did not connect")
        for connection, rank in self._connections.items():
            try:
                if not wait_patiently(connection.poll, START_LIMIT):
                    raise EOFError
                connection.recv()
            except EOFError:
                self._fail(f"(rank {rank}) could not collect the tests")

    def _fail(self, what: str) -> NoReturn:
        output = "\n".join(self._job.output())
        pytest.fail(f"a rank of {self.ranks} {what}; output of the job:\n{output}", pytrace=False)

    def run(self, nodeid: str, limit: float, following: str | None = None) -> list[RankResult]:
        """Run one test; return the result of each rank.

        Ranks are hung if for ``limit`` seconds none of them finishes. Fixtures that the
        ``following`` test needs too are kept for it.
        """
        results = []
        for connection in self._connections:
            with contextlib.suppress(OSError):  # of a rank that died, which receiving will show
                connection.send((nodeid, limit, following))
        waiting = dict(self._connections)
        while waiting and (ready := wait_patiently(partial(wait, waiting), limit)):
            for connection in [each for each in waiting if each in ready]:
                rank = waiting.pop(connection)
                try:
                    results.append(RankResult(rank, *connection.recv()))
                except (EOFError, OSError):
                    results.append(RankResult(rank, "died"))
                if results[-1].status in ("failed", "died"):
                    limit = min(limit, GRACE_AFTER_FAILURE)
        results += [RankResult(r, "hung", stack=self._stack_of(r)) for r in waiting.values()]
        return sorted(results)

    def _stack_of(self, rank: int) -> str:
        """Return the stacks of a rank that is stuck, perhaps in C code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[rank], STACK_SIGNAL)
        path = self._directory / f"stack{rank}"
        deadline = time.monotonic() + STACK_LIMIT
        stack = ""
        while time.monotonic() < deadline and not stack.rstrip().endswith(_ENDS_OF_STACKS):
            time.sleep(0.02)
            with contextlib.suppress(FileNotFoundError):
                stack = path.read_text(errors="replace")
        return _BELOW_THE_TEST.sub("", stack).rstrip() or "(it does not react to a signal either)"

    def close(self) -> str:
        """Let the ranks end by themselves; return a description of problems, or ``''``."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        result = self._job.wait(timeout=60)
        self._clear()
        how = f"ended with exit code {result.returncode}, left behind: {result.left_behind}"
        if result.timed_out:
            how = "did not end"
        elif not result.returncode and not result.left_behind:
            return ""
        return f"after their last test, {self.ranks} ranks {how}\n{result.stderr}"

    def kill(self, *, has_died: bool = True) -> str:
        """Kill the ranks; return output of ranks and ``mpiexec`` that pytest did not capture.

        Unless a rank ``has_died`` before, leave out what is printed because of this.
        """
        before, with_end = self._job.output(), self._job.kill()
        self._clear()
        output = with_end if has_died else before
        return "\n".join(filter(None, (text.strip() for text in output)))

    def _clear(self) -> None:
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class RankWorker:
    """Replaces pytest's loop over the tests by a loop over the requests of the pool."""

    def __init__(self, connection: Connection, ranks: int) -> None:
        self.__name__ = WORKER_NAME  # under which pytest registers it
        self.ranks = ranks
        self._connection = connection
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Collector, obj: object
    ) -> list[pytest.Item] | None:
        """Leave out tests without the marker: ranks take most of their start to collect tests."""
        is_marked = any(mark.name == "mpi" for mark in getattr(obj, "pytestmark", ()))
        is_elsewhere = not is_marked and collector.get_closest_marker("mpi") is None
        return [] if inspect.isfunction(obj) and is_elsewhere else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that the pool requests, until it says stop or is gone."""
        if session.testsfailed:
            raise session.Interrupted("errors during collection")
        # It has shown errors of the collection; from here on, the pool shows errors.
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
            nodeid, limit, following = order
            faulthandler.dump_traceback_later(limit + _GRACE_WITHOUT_POOL, exit=True)
            self._connection.send(self._run(items[nodeid], items.get(following)))
            faulthandler.cancel_dump_traceback_later()

    def _run(
        self, item: pytest.Item, following: pytest.Item | None
    ) -> tuple[str, list[dict[str, Any]]]:
        self._reports.clear()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        outcomes = {report.outcome for report in self._reports}
        status = next((o for o in ("failed", "skipped") if o in outcomes), "passed")
        serialize = item.config.hook.pytest_report_to_serializable
        return status, [serialize(config=item.config, report=report) for report in self._reports]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep pytest's reports of the running test."""
        self._reports.append(report)


def main(directory: Path, arguments: list[str]) -> int:
    """Run the tests that the pool in this directory requests."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    stack = (directory / f"stack{rank}").open("w")
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    with contextlib.chdir(directory):
        connection = Client("socket", "AF_UNIX")
    connection.send((rank, os.getpid()))
    # Capturing only sys lets MPI's own messages through.
    private = ["-p", "no:cacheprovider", "--no-header", "-q", "--capture=sys"]
    basetemp = ["--basetemp", str(directory / f"tmp{rank}")]
    worker = RankWorker(connection, MPI.COMM_WORLD.size)
    return int(pytest.main([*private, *basetemp, *arguments], plugins=[worker]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
