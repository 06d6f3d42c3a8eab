"""Pytest plugin: ``@pytest.mark.mpi(2)`` runs a test on two ranks under a real ``mpiexec``.

``@pytest.mark.mpi(1, 2, 3, timeout=10)`` runs it three times, on one, two and three ranks, for up
to ten seconds each. A test passes if it passes on every rank. Fixtures are set up on the ranks;
those of a module last until its last test on this number of ranks. The fixture ``mpi_ranks`` is
the number of ranks, ``shared_tmp_path`` a folder that they share.

``pytest --mpi-ranks 2 --mpi-ranks 3`` deselects tests on other numbers of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from chainermn.testing.rank_pool import WORKER_NAME, RankPool, RankResult

DEFAULT_TIMEOUT = 120.0
# Characters; enough for a crash with the stacks of all threads.
_MOST_OUTPUT = 20_000
_MARKERS = (
    "mpi(*ranks, timeout=120): run once on each of these numbers of ranks",
    # The applications use these, and copies of them have no configuration of pytest.
    "each_mpi: depends on how an MPI behaves; -m each_mpi selects these tests",
    "gpu: needs a GPU; -m gpu selects these tests",
    "nightly: takes long, or shows more of the same; nox -s nightly_tests runs it",
)
_GRAVITY = ("failed", "died", "hung", "skipped", "passed")


def _ranks(item: pytest.Item) -> int | None:
    """Return the number of ranks of a test, or None without the marker."""
    return item.callspec.params["mpi_ranks"] if item.get_closest_marker("mpi") else None  # type: ignore[attr-defined]


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
    """Declare the markers; outside the ranks, take over the tests for several ranks."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    if not config.pluginmanager.hasplugin(WORKER_NAME):
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
    worker = metafunc.config.pluginmanager.get_plugin(WORKER_NAME)
    ranks = [n for n in marker.args if worker is None or n == worker.ranks]
    metafunc.parametrize("mpi_ranks", ranks, indirect=True, ids=lambda n: f"n={n}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect numbers of ranks that were not asked for."""
    wanted = config.getoption("mpi_ranks")
    if wanted is not None:
        left_out = {item for item in items if _ranks(item) not in (None, *wanted)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def mpi_ranks(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks that run this test: 1 without the marker."""
    return int(getattr(request, "param", 1))


@pytest.fixture(autouse=True)
def chainer_settings() -> Generator[None, None, None]:
    """Undo what a test, or a script that it calls, sets in ``chainer.global_config``."""
    config = sys.modules["chainer"].global_config if "chainer" in sys.modules else None
    before = dict(vars(config)) if config else {}
    yield
    if config:
        vars(config).clear()
        vars(config).update(before)


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
        self._pools: dict[int, RankPool] = {}
        self._next: dict[str, str] = {}  # test that follows on the same number of ranks

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which test follows which on its pool."""
        last: dict[int, str] = {}
        for item in session.items:
            if ranks := _ranks(item):
                if ranks in last:
                    self._next[last[ranks]] = item.nodeid
                last[ranks] = item.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a marked test on its ranks, and report the result."""
        marker, ranks = item.get_closest_marker("mpi"), _ranks(item)
        if marker is None or ranks is None:
            return None
        limit = float(marker.kwargs.get("timeout", DEFAULT_TIMEOUT))
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        call: pytest.CallInfo[Any] = pytest.CallInfo.from_call(
            lambda: self._run(item, ranks, limit),
            "call",
            reraise=(pytest.exit.Exception, KeyboardInterrupt),
        )
        failed = call.excinfo is not None
        reports = [pytest.TestReport.from_item_and_call(item, call)] if failed else call.result
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # Earlier tests of this process may have fixtures that the next one does not share.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def _run(self, item: pytest.Item, ranks: int, limit: float) -> list[pytest.TestReport]:
        """Return the reports of a test that passes or is skipped on every rank; else fail."""
        if ranks not in self._pools:
            self._pools[ranks] = RankPool(ranks, self._arguments(item.session, ranks))
        results = self._pools[ranks].run(item.nodeid, limit, self._next.get(item.nodeid))
        if {result.status for result in results} in ({"passed"}, {"skipped"}):
            return self._reports(results[0])
        has_died = any(result.status == "died" for result in results)
        output = self._pools.pop(ranks).kill(has_died=has_died)
        # Pytest's summary shows the first line: failures come first.
        results.sort(key=lambda result: _GRAVITY.index(result.status))
        text = "\n".join(self._describe(result, ranks, limit) for result in results)
        if output:
            text += f"\n──── output of the job ────\n{output[-_MOST_OUTPUT:]}"
        pytest.fail(text, pytrace=False)

    def _arguments(self, session: pytest.Session, ranks: int) -> list[str]:
        config = self._config
        files = {str(item.path) for item in session.items if _ranks(item) == ranks}
        arguments = ["--rootdir", str(config.rootpath), *sorted(files)]
        if config.inipath:
            arguments += ["-c", str(config.inipath)]
        for warning_filter in config.getoption("pythonwarnings") or ():
            arguments += ["-W", warning_filter]
        if config.pluginmanager.hasplugin("timeout"):
            arguments += ["-o", "timeout=0"]  # the pool enforces the limit
        return arguments

    def _reports(self, result: RankResult) -> list[pytest.TestReport]:
        restore = self._config.hook.pytest_report_from_serializable
        return [restore(config=self._config, data=data) for data in result.reports]

    def _describe(self, result: RankResult, ranks: int, limit: float) -> str:
        meaning = {
            "hung": f"did not finish (limit {limit:g} s, less once another rank has failed)",
            "died": "died: its process is gone",
        }.get(result.status, result.status)
        lines = [f"──── rank {result.rank} of {ranks}: {meaning} ────"]
        if result.stack:
            lines.append(result.stack)
        for report in self._reports(result):
            if report.failed:
                lines.append(report.longreprtext)
                lines += [f"-- {title} --\n{text}" for title, text in report.sections]
        return "\n".join(lines)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """End the ranks; the session fails if they do not end cleanly."""
        yield
        if session.exitstatus == pytest.ExitCode.INTERRUPTED:
            return  # ranks in a test would not end
        complaints = [self._pools.pop(ranks).close() for ranks in list(self._pools)]
        if any(complaints):
            pytest.exit("\n".join(filter(None, complaints)), pytest.ExitCode.TESTS_FAILED)

    def pytest_unconfigure(self) -> None:
        """Kill the ranks after an internal error or an interrupt."""
        while self._pools:
            self._pools.popitem()[1].kill()
