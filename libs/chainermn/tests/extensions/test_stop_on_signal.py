"""A signal to any rank stops all ranks in the same iteration, with a checkpoint of it."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chainermn
from chainermn.extensions import StopOnSignal
from chainermn.testing.mpiexec import run_job

HERE = Path(__file__).parent


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(HERE)
    import stop_and_resume

    return stop_and_resume


def stopped_at(printed: str, signals: Sequence[str]) -> int:
    """Return the iteration that ended a training; it must not come before a signal."""
    message = re.search(r"chainermn: rank \d got (\S+): .* iteration (\d+) is", printed)
    assert message, printed
    sent = [text.split(":") for text in signals]
    assert message[1] in [name for *_, name in sent]
    assert min(int(at) for _, at, _ in sent) <= int(message[2]) < 12
    return int(message[2])


def assert_same_states(folder: Path, n_ranks: int) -> None:
    for rank in range(n_ranks):
        one, other = (np.load(folder / name / f"state.{rank}.npz") for name in ("whole", "broken"))
        assert one.files == other.files
        for name in one.files:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.each_mpi
@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(
    ("kind", "signals"),
    [
        ("checkpointer", ["0:2:SIGUSR1"]),
        ("snapshot", ["-1:3:SIGTERM"]),
        ("snapshot", ["all:3:SIGUSR1"]),
        ("checkpointer", ["-1:2:SIGUSR1", "0:2:SIGTERM"]),
    ],
)
def test_resumed_training_equals_an_unbroken_one(
    kind: str,
    signals: list[str],
    job: Any,
    shared_tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    mpi_ranks: int,
) -> None:
    whole, broken = shared_tmp_path / "whole", shared_tmp_path / "broken"
    world = chainermn.create_communicator("naive")
    job.train(world, kind, whole)
    with pytest.raises(SystemExit) as ended:
        job.train(world, kind, broken, *signals)
    assert ended.value.code == StopOnSignal.exit_code == 75
    printed = capfd.readouterr().err
    iteration = world.bcast_obj(stopped_at(printed, signals) if world.rank == 0 else None)
    assert list(broken.glob("state.*")) == []
    world.mpi_comm.Barrier()
    assert job.train(world, kind, broken) == iteration
    world.mpi_comm.Barrier()
    assert_same_states(shared_tmp_path, mpi_ranks)


@pytest.mark.each_mpi
def test_stopped_job_is_resumed_by_another(tmp_path: Path) -> None:
    script, broken = HERE / "stop_and_resume.py", tmp_path / "broken"
    stopped = run_job(2, [script, "snapshot", broken, "1:3:SIGTERM"])
    assert (stopped.timed_out, stopped.left_behind) == (False, [])
    assert stopped.returncode == StopOnSignal.exit_code, stopped
    iteration = stopped_at(stopped.stderr, ["1:3:SIGTERM"])
    assert len(list(broken.glob(f"snapshot_iter_{iteration}*"))) == 2
    resumed = run_job(2, [script, "snapshot", f"{tmp_path / 'whole'},{broken}"]).check()
    assert resumed.stdout.split() == ["0", str(iteration)]
    assert_same_states(tmp_path, 2)


@pytest.mark.mpi(2)
def test_signal_in_the_last_iteration(job: Any, shared_tmp_path: Path) -> None:
    """Nothing is lost, whether or not the ranks still ask each other."""
    world = chainermn.create_communicator("naive")
    try:
        job.train(world, "checkpointer", shared_tmp_path, "1:12:SIGUSR1")
    except SystemExit as ended:
        assert ended.code == 75
        assert (shared_tmp_path / f"job.{world.rank}.12").exists()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers, even if a test fails."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.mpi(1, 3)
def test_handlers_are_put_back(comm: Any, handlers: None) -> None:
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
def test_wrong_arguments(comm: Any, handlers: None) -> None:
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
def test_other_threads_cannot_handle_signals(comm: Any) -> None:
    raised = []

    def create() -> None:
        with pytest.raises(ValueError, match="main thread") as caught:
            StopOnSignal(comm, print)
        raised.append(caught)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    assert raised
