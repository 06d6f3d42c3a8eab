"""A signal to any rank stops all ranks in the same iteration, with a checkpoint of it."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chainermn
from chainermn.extensions import StopOnSignal
from chainermn.testing.mpiexec import JobResult, run_job

SCRIPT = Path(__file__).with_name("stop_and_resume.py")


def job(ranks: int, folder: Path, kind: str, *signals: str) -> JobResult:
    return run_job(ranks, [SCRIPT, folder, "12", kind, *signals])


def states(folder: Path) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(path)) for path in sorted(folder.glob("state.*"))]


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("ranks", "kind", "signals"),
    [
        (1, "checkpointer", ["0:2:SIGUSR1"]),
        (2, "snapshot", ["1:3:SIGTERM"]),
        (3, "snapshot", ["all:3:SIGUSR1"]),
        (3, "checkpointer", ["2:2:SIGUSR1", "0:2:SIGTERM"]),
    ],
)
def test_resumed_training_equals_an_unbroken_one(
    tmp_path: Path, ranks: int, kind: str, signals: list[str]
) -> None:
    job(ranks, tmp_path / "whole", kind).check()
    out = tmp_path / "broken"
    stopped = job(ranks, out, kind, *signals)
    assert (stopped.timed_out, stopped.left_behind) == (False, [])
    assert stopped.returncode == StopOnSignal.exit_code == 75, stopped
    message = re.search(r"chainermn: rank \d got (\S+): .* iteration (\d+) is", stopped.stderr)
    assert message, stopped
    iteration = int(message[2])
    assert int(stopped.stdout) == iteration
    sent = [text.split(":") for text in signals]
    assert message[1] in [name for *_, name in sent]
    assert min(int(at) for _, at, _ in sent) <= iteration < 12
    assert list(out.glob("state.*")) == []

    resumed = job(ranks, out, kind).check()
    assert int(resumed.stdout) == 12
    for one, other in zip(states(tmp_path / "whole"), states(out), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_signal_in_the_last_iteration(tmp_path: Path) -> None:
    """Nothing is lost, whether or not the ranks still ask each other."""
    ended = job(2, tmp_path, "checkpointer", "1:12:SIGUSR1")
    assert (ended.returncode, int(ended.stdout)) in [(0, 12), (75, 12)]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers, even if a test fails."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.mpi(1, 3)
def test_handlers_are_put_back(handlers: None) -> None:
    comm = chainermn.create_communicator("naive")
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    extension = StopOnSignal(comm, print)
    assert signal.getsignal(signal.SIGUSR1) == signal.getsignal(signal.SIGTERM) != before[0]
    extension.finalize()
    extension.finalize()
    after = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    assert before == after


@pytest.mark.mpi(1)
def test_processes_that_a_rank_starts_live_on(handlers: None) -> None:
    extension = StopOnSignal(chainermn.create_communicator("naive"), print)
    with subprocess.Popen(["sleep", "600"]) as child:
        child.send_signal(signal.SIGUSR1)
        child.send_signal(signal.SIGTERM)
    extension.finalize()
    assert child.returncode == -signal.SIGTERM
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.mpi(1, 3)
def test_wrong_arguments(handlers: None) -> None:
    comm = chainermn.create_communicator("naive")
    with pytest.raises(TypeError, match="swapped"):
        StopOnSignal(print, comm)  # type: ignore[arg-type]
    last = comm.rank == comm.size - 1
    cases: list[tuple[Any, Any, str]] = [
        (None if last else print, [signal.SIGUSR1], "checkpoint must be a checkpointer"),
        (print, [9999 if last else signal.SIGUSR1], "9999 is not a valid Signals"),
        (print, [signal.SIGKILL if last else signal.SIGUSR1], "no program can handle SIGKILL"),
    ]
    if comm.size > 1:
        cases.append((print, [signal.SIGUSR2 if last else signal.SIGUSR1], "the ranks disagree"))
    for checkpoint, signals, message in cases:
        before = signal.getsignal(signal.SIGUSR1)
        with pytest.raises(ValueError, match=message):
            StopOnSignal(comm, checkpoint, signals)
        assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.mpi(1)
def test_other_threads_cannot_handle_signals() -> None:
    comm = chainermn.create_communicator("naive")
    raised = []

    def create() -> None:
        with pytest.raises(ValueError, match="main thread") as caught:
            StopOnSignal(comm, print)
        raised.append(caught)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    assert raised
