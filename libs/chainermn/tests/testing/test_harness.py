"""The test harness itself: how it handles ranks that fail, hang or disappear."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import psutil
import pytest

from chainermn.testing import mpiexec, pytest_plugin
from chainermn.testing.mpiexec import Job, JobResult

pytestmark = pytest.mark.each_mpi

# Inherited by every process of an inner pytest, so that strays can be found.
MARK = "CHAINERMN_TEST_OF_THE_HARNESS"

TESTS = {
    "passes": "pass",
    "sees_its_ranks": "assert MPI.COMM_WORLD.size == mpi_ranks == 2",
    "shares_a_directory": """
        (shared_tmp_path / str(RANK)).touch()
        MPI.COMM_WORLD.Barrier()
        assert len(list(shared_tmp_path.iterdir())) == 2""",
    "notes": "notes.append(RANK)",
    "finds_the_note": "assert notes == [RANK]",
    "raises_warnings": """
        with pytest.raises(UserWarning):
            warnings.warn("an error here")""",
    "warns_of_what_is_let_pass": "warnings.warn('let pass by -W')",
    "is_skipped": "pytest.skip('not today')",
    "fails_on_one": """
        chainermn.create_communicator()
        print("from rank", RANK)
        assert RANK != 1, 'one is wrong'""",
    "fails_while_another_waits": """
        if RANK == 0:
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        MPI.COMM_WORLD.Barrier()
        if RANK == 1:
            raise RuntimeError("gave up")
        MPI.COMM_WORLD.Barrier()""",
    "takes_signals_of_users": """
        faulthandler.register(signal.SIGUSR2, file=2)
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})""",
    "hangs": """
        if RANK == 1:
            MPI.COMM_WORLD.recv(source=0)""",
    "exits": """
        MPI.COMM_WORLD.Barrier()
        if RANK == 1:
            os._exit(0)
        MPI.COMM_WORLD.Barrier()""",
    "passes_again": "pass",
    "disagrees": "RANK == 1 and pytest.skip('only here')",
}

HEAD = """
import faulthandler, os, signal, subprocess, warnings
import pytest
from mpi4py import MPI
import chainermn

RANK = MPI.COMM_WORLD.rank


@pytest.fixture(scope="module")
def notes():
    return []


def test_alone():
    pass


@pytest.mark.mpi(2, 3)
def test_on_several():
    pass


@pytest.mark.mpi(2)
class TestMarked:
    def test_takes_marks_of_classes(self):
        assert MPI.COMM_WORLD.size == 2
"""


@dataclass(frozen=True)
class Session:
    """An inner pytest that has run each of `TESTS` on two ranks, and those of `HEAD`."""

    outcomes: dict[str, tuple[str, str]]  # by test: passed, failed or skipped, and the text
    strays: list[psutil.Process]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    directory = tmp_path_factory.mktemp("inner")
    parts = [HEAD]
    for name, body in TESTS.items():
        indented = textwrap.indent(textwrap.dedent(body).strip(), "    ")
        limit = ", timeout=1" if name == "hangs" else ""
        signature = (
            f"@pytest.mark.mpi(2{limit})\ndef test_{name}(mpi_ranks, shared_tmp_path, notes):"
        )
        parts.append(f"{signature}\n{indented}\n")
    write_suite(directory, "\n".join(parts))
    temporary = directory / ("long" * 30)  # longer than the path of a socket may be
    temporary.mkdir()
    mark = f"session-{os.getpid()}"
    options = ["--junitxml=report.xml", "-W", "ignore:let pass"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--mpi-ranks", "1", "--mpi-ranks", "2"],
        cwd=directory,
        env={**os.environ, MARK: mark, "TMPDIR": str(temporary)},
        capture_output=True,
    )
    outcomes = {}
    for case in ElementTree.parse(directory / "report.xml").iter("testcase"):
        name = case.get("name", "").removeprefix("test_").removesuffix("[n=2]")
        outcome = next(
            (kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None
        )
        text = " ".join(case.itertext()) + (case[0].get("message") or "" if len(case) else "")
        outcomes[name] = (outcome or "passed", text)
    return Session(outcomes, mpiexec.processes_with(MARK, mark))


def write_suite(directory: Path, tests: str) -> None:
    (directory / "test_inner.py").write_text(tests)
    (directory / "conftest.py").write_text(
        "from chainermn.testing import rank_pool\n"
        "pytest_plugins = ['chainermn.testing.pytest_plugin']\n"
        "rank_pool.GRACE_AFTER_FAILURE = 0.5\n"
    )
    (directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")


@pytest.mark.parametrize(
    "name",
    [
        *("passes", "sees_its_ranks", "shares_a_directory", "passes_again"),
        *("notes", "finds_the_note", "raises_warnings", "warns_of_what_is_let_pass"),
        *("takes_signals_of_users", "takes_marks_of_classes"),
    ],
)
def test_passing(session: Session, name: str) -> None:
    outcome, text = session.outcomes[name]
    assert outcome == "passed", text


def test_numbers_of_ranks_can_be_chosen(session: Session) -> None:
    others = {"alone", "on_several", "takes_marks_of_classes"}
    assert session.outcomes.keys() == {*TESTS, *others}


def test_one_rank_fails(session: Session) -> None:
    outcome, text = session.outcomes["fails_on_one"]
    assert outcome == "failure"
    assert "rank 1 of 2: failed" in text
    assert "one is wrong" in text
    assert "from rank 1" in text
    assert "rank 0 of 2: passed" in text
    # The end of the ranks is not shown as a failure of its own.
    assert "disappeared" not in text
    assert "output of the job" not in text


def test_failure_while_another_waits_shows_where_that_is(session: Session) -> None:
    outcome, text = session.outcomes["fails_while_another_waits"]
    assert outcome == "failure"
    assert "gave up" in text
    assert "rank 0 of 2: did not finish" in text
    assert text.count("in test_fails_while_another_waits") == 1


def test_hang_ends_at_its_limit(session: Session) -> None:
    outcome, text = session.outcomes["hangs"]
    assert outcome == "failure"
    assert "rank 1 of 2: did not finish (limit 1 s" in text
    assert "in test_hangs" in text


def test_rank_that_is_gone(session: Session) -> None:
    outcome, text = session.outcomes["exits"]
    assert outcome == "failure"
    assert "rank 1 of 2: died" in text


def test_children_of_ranks_are_not_left_behind(session: Session) -> None:
    assert session.strays == []


def test_skips(session: Session) -> None:
    outcome, text = session.outcomes["is_skipped"]
    assert outcome == "skipped"
    assert "not today" in text


def test_a_skip_on_some_ranks_only_is_a_failure(session: Session) -> None:
    assert session.outcomes["disagrees"][0] == "failure"


# Python ignores interrupts if its parent does, and shells make background jobs ignore them.
PYTEST_THAT_CAN_BE_INTERRUPTED = """
import pytest, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(["-q"]))
"""


def test_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    waits = f"open({str(tmp_path / 'waits')!r}, 'w').close(); MPI.COMM_WORLD.recv(source=RANK)"
    write_suite(tmp_path, f"{HEAD}@pytest.mark.mpi(2)\ndef test_wait():\n    {waits}\n")
    mark = f"interrupt-{os.getpid()}"
    pytest_process = subprocess.Popen(
        [sys.executable, "-c", PYTEST_THAT_CAN_BE_INTERRUPTED],
        cwd=tmp_path,
        env={**os.environ, MARK: mark},
        stdout=subprocess.DEVNULL,
    )

    while not (tmp_path / "waits").exists():
        assert pytest_process.poll() is None
        time.sleep(0.02)
    pytest_process.send_signal(signal.SIGINT)
    pytest_process.wait()
    assert mpiexec.processes_with(MARK, mark) == []


def test_ranks_that_do_not_end_cleanly_fail_the_session(tmp_path: Path) -> None:
    exits = "atexit.register(os._exit, 7)"
    write_suite(
        tmp_path, f"import atexit, os, pytest\n@pytest.mark.mpi(2)\ndef test_x(): {exits}\n"
    )
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True
    )
    assert finished.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 passed" in finished.stdout
    assert "after their last test, 2 ranks ended with exit code 7" in finished.stderr


@pytest.mark.parametrize("numbers", [(), (0,), ("2",)])
def test_marker_without_numbers_is_refused(numbers: tuple[Any, ...]) -> None:
    marker = pytest.mark.mpi(*numbers).mark
    item = SimpleNamespace(nodeid="test_x", get_closest_marker={"mpi": marker}.get)
    with pytest.raises(pytest.UsageError, match=r"test_x: .* needs numbers of ranks"):
        pytest_plugin.pytest_generate_tests(cast(Any, SimpleNamespace(definition=item)))


def test_run_job_reports_a_timeout_and_clears_up(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from mpi4py import MPI\n"
        "import os; os.write(1, b'rank %d\\n' % MPI.COMM_WORLD.rank)\n"
        "MPI.COMM_WORLD.recv(source=MPI.COMM_WORLD.rank)\n"
    )
    job = Job(2, [script])
    while job.output()[0].count("rank") < 2:  # Open MPI passes on whole lines
        assert job.process.poll() is None, job.output()
        time.sleep(0.02)
    maps = [Path(f"/proc/{each.pid}/maps").read_text() for each in job.processes()]
    shared = {word for text in maps for word in text.split() if "/mpich_shm_" in word}
    result = job.wait(timeout=0.1)
    assert not any(map(os.path.exists, shared))
    assert result.timed_out
    assert result.returncode != 0
    assert "rank 0" in result.stdout
    assert "rank 1" in result.stdout


@pytest.mark.parametrize(
    ("code", "stderr", "outcome", "is_expected"),
    [
        (0, "", {}, True),
        (0, "words", {}, False),
        (0, "words", {"warns": True}, True),
        (0, "", {"warns": True}, False),
        (1, "", {}, False),
        (1, "words", {"warns": True}, False),
        (1, "words", {"fails": True}, True),
        (0, "", {"fails": True}, False),
    ],
)
def test_check_of_a_job(
    code: int, stderr: str, outcome: dict[str, bool], is_expected: bool
) -> None:
    result = JobResult(code, "", stderr, 1.0)
    hanging = JobResult(code, "", stderr, 1.0, timed_out=True)
    leaving = JobResult(code, "", stderr, 1.0, left_behind=["sleep 600"])
    if is_expected:
        assert result.check(**outcome) is result
    for wrong in (hanging, leaving, *([] if is_expected else [result])):
        with pytest.raises(AssertionError, match=re.escape(f"got {wrong}")):
            wrong.check(**outcome)


def test_job_finds_what_outlives_mpiexec(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 0:\n"
        "    subprocess.Popen(['sleep', '601'], start_new_session=True,\n"
        "                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    )
    result = Job(2, [script]).wait(300, grace=0.5)
    assert not result.timed_out
    assert result.returncode == 0
    assert "sleep 601" in result.left_behind
