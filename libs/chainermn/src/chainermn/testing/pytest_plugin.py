"""Pytest plugin: ``@pytest.mark.mpi(2)`` runs a test on two ranks under a real ``mpiexec``.

``@pytest.mark.mpi(1, 2, 3, timeout=10)`` runs it three times, on one, two and three ranks, for at
most ten seconds each time. A test passes if it passes on every rank. Fixtures are set up on the
ranks: ``mpi_ranks`` is the number of ranks, ``shared_tmp_path`` a directory that they share.

``pytest --mpi-ranks 2 --mpi-ranks 3`` deselects tests on other numbers of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest

from chainermn.testing.rank_pool import RankPool, RankPoolError, RankResult
from chainermn.testing.rank_worker import PLUGIN_NAME

DEFAULT_TIMEOUT = 30.0
# Enough for a crash with the stacks of all threads.
_MOST_OUTPUT = 20_000
_MARKER = "mpi(*ranks, timeout=30): run once on each of these numbers of ranks"
_GRAVITY = ("failed", "died", "hung", "skipped", "passed")


def _marker(item: pytest.Item) -> pytest.Mark | None:
    return item.get_closest_marker("mpi")


def _ranks(item: pytest.Item) -> int:
    return int(item.callspec.params["mpi_ranks"])  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--mpi-ranks``."""
    parser.getgroup("chainermn").addoption(
        "--mpi-ranks",
        action="append",
        type=int,
        metavar="N",
        help="deselect tests on other numbers of ranks; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; outside the ranks, take over the tests that carry it."""
    config.addinivalue_line("markers", _MARKER)
    if not config.pluginmanager.hasplugin(PLUGIN_NAME):
        config.pluginmanager.register(MpiRunner(config), "chainermn-mpi-runner")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat a marked test for each of its numbers of ranks."""
    marker = metafunc.definition.get_closest_marker("mpi")
    if marker is None:
        return
    if not marker.args or not all(isinstance(n, int) and n > 0 for n in marker.args):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: @pytest.mark.mpi needs numbers of ranks, "
            f"as in @pytest.mark.mpi(1, 2); got {marker.args!r}"
        )
    metafunc.parametrize("mpi_ranks", marker.args, indirect=True, ids=lambda n: f"n={n}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect numbers of ranks that were not asked for."""
    wanted = config.getoption("mpi_ranks")
    if wanted is not None:
        left_out = {item for item in items if _marker(item) and _ranks(item) not in wanted}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def mpi_ranks(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks that run this test: 1 without the marker."""
    return int(getattr(request, "param", 1))


@pytest.fixture
def shared_tmp_path(tmp_path: Path, mpi_ranks: int) -> Path:
    """Return an empty directory, the same on all ranks of the test."""
    if mpi_ranks == 1:
        return tmp_path
    from mpi4py import MPI

    return Path(MPI.COMM_WORLD.bcast(tmp_path))


class MpiRunner:
    """Runs marked tests on pools of ranks, one for each number of ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._files: dict[int, dict[str, None]] = {}
        self._pools: dict[int, RankPool] = {}
        self._complaints: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which files the ranks must collect."""
        for item in session.items:
            if _marker(item):
                self._files.setdefault(_ranks(item), {})[str(item.path)] = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a marked test on its ranks, and report the result."""
        marker = _marker(item)
        if marker is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item, float(marker.kwargs.get("timeout", DEFAULT_TIMEOUT))):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # Earlier tests of this process may have fixtures that the next one does not share.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def _run(self, item: pytest.Item, limit: float) -> list[pytest.TestReport]:
        ranks = _ranks(item)
        start = time.time()
        try:
            pool = self._pools.get(ranks) or self._start(ranks)
            results = pool.run(item.nodeid, limit)
        except RankPoolError as error:
            return [self._failure(item, str(error), start)]
        statuses = {result.status for result in results}
        if statuses in ({"passed"}, {"skipped"}):
            restore = self._config.hook.pytest_report_from_serializable
            return [restore(config=self._config, data=data) for data in results[0].reports]
        output = self._pools.pop(ranks).kill()
        # Pytest's summary shows the first line: failures come first.
        results.sort(key=lambda result: _GRAVITY.index(result.status))
        text = "\n".join(self._describe(result, ranks, limit) for result in results)
        if output:
            text += f"\n──── output of the job ────\n{output[-_MOST_OUTPUT:]}"
        return [self._failure(item, text, start)]

    def _start(self, ranks: int) -> RankPool:
        config = self._config
        arguments = ["--rootdir", str(config.rootpath), *self._files[ranks]]
        if config.inipath:
            arguments += ["-c", str(config.inipath)]
        for warning_filter in config.getoption("pythonwarnings") or ():
            arguments += ["-W", warning_filter]
        if config.pluginmanager.hasplugin("timeout"):
            arguments += ["-o", "timeout=0"]  # the pool enforces the limit
        self._pools[ranks] = RankPool(ranks, arguments)
        return self._pools[ranks]

    def _describe(self, result: RankResult, ranks: int, limit: float) -> str:
        meaning = {
            "hung": f"did not finish (limit {limit:g} s, less once another rank has failed)",
            "died": "died: its process is gone",
        }.get(result.status, result.status)
        lines = [f"──── rank {result.rank} of {ranks}: {meaning} ────"]
        if result.stack:
            lines.append(result.stack)
        for data in result.reports:
            report = self._config.hook.pytest_report_from_serializable(
                config=self._config, data=data
            )
            if report.failed:
                lines.append(report.longreprtext)
                lines += [f"-- {title} --\n{text}" for title, text in report.sections]
        return "\n".join(lines)

    @staticmethod
    def _failure(item: pytest.Item, text: str, start: float) -> pytest.TestReport:
        stop = time.time()
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome="failed",
            longrepr=text,
            when="call",
            start=start,
            stop=stop,
            duration=stop - start,
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """End the ranks; the session fails if they do not end cleanly."""
        interrupted = session.exitstatus == pytest.ExitCode.INTERRUPTED
        while self._pools and not interrupted:  # ranks in a test would not end
            _, pool = self._pools.popitem()
            if complaint := pool.close():
                self._complaints.append(complaint)
        if self._complaints and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report ranks that did not end cleanly."""
        for complaint in self._complaints:
            terminalreporter.section("ranks that did not end cleanly", red=True)
            terminalreporter.write_line(complaint)

    def pytest_unconfigure(self) -> None:
        """Kill the ranks after an internal error or an interrupt."""
        while self._pools:
            self._pools.popitem()[1].kill()
