"""However a rank fails, the job ends by itself, prints a message, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path

import pytest

from chainermn.testing import mpiexec
from chainermn.testing.mpiexec import Job, JobResult, run_job
from libs.chainermn.tests.failures.cases import (
    BOUND,
    CASES,
    SCRIPT,
    STALL_LIMIT,
    Case,
    check,
    observe,
)

pytestmark = pytest.mark.each_mpi

HOST = socket.gethostname()
# Ten times the promised bound, which the benchmarks check on an idle machine.
TIMEOUT = 10 * (BOUND + STALL_LIMIT)

# The exception hook, iterators and applications have tests of their own for some of the others.
ALWAYS_RUN = ("SIGKILL", "SIGSTOP", "SIGTERM to mpiexec")


def run(*arguments: str, limit: float = 300, ranks: int = 2, cwd: Path | None = None) -> JobResult:
    env = {"CHAINERMN_STALL_LIMIT": str(limit)}
    return run_job(ranks, [SCRIPT, *arguments], timeout=TIMEOUT, env=env, cwd=cwd)


def assert_ended(result: JobResult, *texts: str) -> None:
    assert not result.timed_out, result.stderr
    assert result.returncode != 0, result.stderr
    assert result.left_behind == [], result
    for text in texts:
        assert text in result.stderr


def check_end(case: Case, job: Job, rank: int = 1) -> None:
    """Check that a job ends as expected, and that nothing of its shared memory stays."""
    outcome = observe(case, job, 10 * case.bound)
    check(case, outcome, (HOST, HOST), rank)
    for shared in re.findall(r"/dev/shm/\S+", outcome.result.stdout):
        while Path(shared).exists():  # the process that removes it ends soon
            time.sleep(0.02)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.name, marks=[] if case.name in ALWAYS_RUN else pytest.mark.nightly
        )
        for case in CASES
    ],
)
def test_rank_1_fails(case: Case) -> None:
    is_silence = case.stall_limit == STALL_LIMIT
    env = {"CHAINERMN_STALL_LIMIT": "3"} if is_silence else case.environment
    job = Job(2, [SCRIPT, case.name], env=env)
    check_end(case, job)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rank_0_fails(case: Case) -> None:
    job = Job(2, [SCRIPT, case.name, "0"], env=case.environment)
    check_end(case, job, rank=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "number", "text"),
    [
        ([], signal.SIGHUP, r"mpiexec(, or the whole job, got SIGTERM| was killed,)"),
        (["timeout", "1000"], signal.SIGTERM, "mpiexec, or the whole job, got SIGTERM"),
    ],
)
def test_job_is_ended_from_outside(
    command: list[str], number: signal.Signals, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = [*command, *mpiexec.mpiexec_command(2, [SCRIPT, "SIGTERM to mpiexec"])]
    monkeypatch.setattr(mpiexec, "mpiexec_command", lambda *_: launched)
    case = Case("", to_mpiexec=number)
    outcome = observe(case, Job(2, []), TIMEOUT)
    check(case, outcome, (HOST, HOST))
    assert re.match(f"chainermn: {text}.*\nEnding the whole job.\n", outcome.result.stderr)


@pytest.mark.nightly
def test_crash_shows_where_it_was() -> None:
    assert_ended(run("segmentation fault", "0"), f'"{SCRIPT}"')


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "call"),
    [
        ("recv", "allreduce (call 2 on communicator 1 of ranks 0-1)"),
        ("recv on both", "recv_obj from rank 1 (call 1 on communicator 1 of ranks 0-1"),
    ],
)
def test_ranks_that_wait_for_each_other(how: str, call: str) -> None:
    result = run(how, limit=STALL_LIMIT)
    assert_ended(result, "these ranks wait for each other", f"rank 0 on {HOST} has been in {call}")


@pytest.mark.nightly
def test_rank_that_computes_is_waited_for() -> None:
    result = run("compute", limit=10)
    assert result.returncode == 0, result.stderr
    assert "ranks have waited" in result.stderr
    assert f"HAS NOT arrived: rank 1 on {HOST}, which is at {SCRIPT}:" in result.stderr


def test_extension_on_one_rank_only_is_named_long_before_the_stall_limit(tmp_path: Path) -> None:
    result = run("extension", cwd=tmp_path, limit=1e6)
    assert_ended(
        result,
        "these ranks wait for each other",
        f"rank 0 on {HOST} has been in multi_node_mean_grad (call ",
        f"rank 1 on {HOST} has been in allgather_obj (call ",
        f"called by extension 'validation' (Evaluator), at {SCRIPT}:",
        "Only some of these ranks are in extension 'validation' (Evaluator). ",
    )


def test_rank_that_leaves_early_is_noticed_while_a_timeline_is_recorded(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    case = next(case for case in CASES if case.name == "sys.exit 0")
    env = {**case.environment, "CHAINERMN_TIMELINE": str(timeline)}
    job = Job(2, [SCRIPT, case.name], env=env)
    check_end(case, job)
    assert not timeline.exists()


@pytest.mark.nightly
def test_all_raise_and_each_traceback_is_whole() -> None:
    result = run("all raise")
    assert_ended(result, "RuntimeError: by design")
    for part in result.stderr.split("chainermn: rank ")[1:]:
        lines = part.splitlines()
        assert lines[1].startswith("Traceback")
        assert "RuntimeError: by design" in lines


@pytest.mark.nightly
@pytest.mark.parametrize("who", ["0", "1"])
def test_rank_that_ends_before_create_communicator(who: str) -> None:
    result = run("early exit", who, ranks=4)  # the other three notice it, in turn
    assert_ended(result)
    said = f"rank {who} on {HOST} ended before create_communicator"
    said_by_open_mpi = f"prterun has exited due to process rank {who} with PID"
    assert said in result.stderr or said_by_open_mpi in result.stderr, result


def test_regular_end_keeps_the_exit_code_and_waits_for_the_last() -> None:
    result = run("regular")
    assert result.returncode == 7
    assert result.left_behind == [], result
    assert "chainermn: " not in result.stderr
