"""However a rank fails, the whole job ends by itself, with a message, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from chainermn.testing.mpiexec import Job, JobResult, run_job

pytestmark = pytest.mark.skipif(
    "CHAINERMN_LONG_TESTS" not in os.environ,
    reason="CHAINERMN_LONG_TESTS is not set: they take two minutes",
)

SCRIPT = Path(__file__).parent / "fail.py"
HOST = socket.gethostname()
# Generous, since the machine may be busy; what hangs is ended from outside at the timeout.
TIMEOUT = 60.0


def run(*arguments: str, limit: float = 300) -> JobResult:
    return run_job(
        2, [SCRIPT, *arguments], timeout=TIMEOUT, env={"CHAINERMN_STALL_LIMIT": str(limit)}
    )


def assert_ended(result: JobResult, *texts: str) -> None:
    assert not result.timed_out, result.stderr
    assert result.returncode != 0, result.stderr
    assert result.left_behind == [], result
    for text in texts:
        assert text in result.stderr


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("sys.exit 0", f"rank 1 on {HOST} has ended its script, or called sys.exit"),
        ("sys.exit 3", "allreduce (call 2 on communicator 1 of ranks 0-1)"),
        ("os._exit", f"rank 1 on {HOST} (process "),
        ("SIGKILL", f"rank 1 on {HOST} (process "),
        ("SIGTERM", f"rank 1 on {HOST} (process "),
        ("segmentation fault", f"rank 1 on {HOST} (process "),
    ],
)
def test_rank_is_gone(how: str, text: str) -> None:
    assert_ended(run(how), text)


def test_crash_shows_where_it_was() -> None:
    assert_ended(run("segmentation fault", "0"), "Segmentation fault", f'"{SCRIPT}"')


def test_rank_0_is_killed() -> None:
    assert_ended(run("SIGKILL", "0"), f"rank 0 on {HOST} (process ")


@pytest.mark.parametrize("who", ["0", "1"])
def test_rank_that_stops_answering(who: str) -> None:
    result = run("SIGSTOP", who, limit=5)
    assert_ended(result, f"rank {who} on {HOST} (process ", "has been silent for")


@pytest.mark.parametrize(
    ("how", "call"),
    [
        ("recv", "allreduce (call 2 on communicator 1 of ranks 0-1)"),
        ("recv on both", "recv_obj from rank 1 (call 1 on communicator 1 of ranks 0-1"),
    ],
)
def test_ranks_that_wait_for_each_other(how: str, call: str) -> None:
    result = run(how, limit=4)
    assert_ended(result, "these ranks wait for each other", f"rank 0 on {HOST} is in {call}")


def test_rank_that_computes_is_waited_for() -> None:
    result = run("compute", limit=1)
    assert result.returncode == 0, result.stderr
    assert "ranks have waited for" in result.stderr
    assert f"HAS NOT come: rank 1 on {HOST}, which is at {SCRIPT}:" in result.stderr


def test_all_raise_and_each_traceback_is_whole() -> None:
    result = run("all raise")
    assert_ended(result, "RuntimeError: by design")
    for part in result.stderr.split("chainermn: rank ")[1:]:
        lines = part.splitlines()
        assert lines[1].startswith("Traceback")
        assert "RuntimeError: by design" in lines


def test_rank_that_ends_before_create_communicator() -> None:
    result = run("early exit")
    assert_ended(result)


def test_regular_end_keeps_the_exit_code_and_waits_for_the_last() -> None:
    result = run("regular")
    assert result.returncode == 7
    assert result.left_behind == [], result
    assert "chainermn: " not in result.stderr


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_mpiexec_gets_a_signal_while_ranks_wait(signal_number: int) -> None:
    job = Job(2, [SCRIPT, "wait"])
    try:
        deadline = time.monotonic() + TIMEOUT
        while job.output()[0].count("started") < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        job.process.send_signal(signal_number)
        result = job.wait(TIMEOUT)
    except BaseException:
        job.kill()
        raise
    assert_ended(result)
