"""Workers read ahead, never load MPI, and end with their rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import psutil
import pytest

import chainermn
from chainermn.iterators import MultiprocessIterator
from chainermn.testing.mpiexec import Job
from libs.chainermn.tests.process.hidden_modules import hide_all_modules

LIMIT = 600  # seconds, however busy the machine is
PROBE = """
import os, sys, time
from pathlib import Path
import chainermn
import numpy as np

class Probe:
    def __len__(self):
        return 40

    def __getitem__(self, i):
        Path("worker").write_text(str(os.getpid()))
        while not Path("go on").exists():
            time.sleep(0.01)
        return np.array([i, "beside" in sys.modules, "mpi4py.MPI" in sys.modules])

if __name__ == "__main__":
    chainermn.iterators.start_forkserver(preload=["__main__", "beside"])
    comm = chainermn.create_communicator()
    iterator = chainermn.iterators.MultiprocessIterator(
        Probe(), 10, n_processes=2, n_prefetch=4, repeat=False, shuffle=False, shared_mem=24
    )
    Path(f"ready.{comm.rank}").touch()
    found = np.concatenate([np.stack(batch) for batch in iterator])
    assert (found[:, 0] == np.arange(40)).all(), found
    assert found[:, 1].all(), found
    assert not found[:, 2].any(), found
    iterator.finalize()
    print("fine")
"""


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "Pool", context.Pool)


class Squares:
    """A data set of pairs: a row of squares and a number."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return np.full(4, i * i, np.float64), i


@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("shared_mem", [None, 32])
def test_batches_are_those_of_one_process(shared_mem: int | None) -> None:
    iterator = MultiprocessIterator(
        Squares(),
        4,
        n_processes=2,
        n_prefetch=3,
        repeat=False,
        shuffle=False,
        shared_mem=shared_mem,
    )
    for _ in range(2):
        batches = list(iterator)
        assert [[number for _, number in batch] for batch in batches] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
        ]
        for row, number in (example for batch in batches for example in batch):
            np.testing.assert_array_equal(row, np.full(4, number**2))
        iterator.reset()
    iterator.finalize()


def shuffling(sampler: Any = None, n_prefetch: int = 3) -> Any:
    return MultiprocessIterator(
        Squares(), 3, n_processes=1, n_prefetch=n_prefetch, shared_mem=32, order_sampler=sampler
    )


def numbers(iterator: Any) -> list[int]:
    return [number for _, number in next(iterator)]


@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_snapshot_of_what_has_been_taken_not_read() -> None:
    sampler = chainermn.datasets.DistributedOrderSampler(10, 0, 10, seed=3)
    with shuffling(sampler) as first, shuffling(sampler) as second:
        for _ in range(2):
            next(first)
        saved = chainer.serializers.npz.serialize(first)
        following = numbers(first)
        chainer.serializers.NpzDeserializer(saved).load(second)
        assert numbers(second) == following


@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("n_prefetch", [1, 3])
def test_orders_are_drawn_apart_from_the_training_and_resume(n_prefetch: int) -> None:
    np.random.seed(7)
    with shuffling(n_prefetch=n_prefetch) as iterator:
        batches, snapshots = [], []
        for _ in range(10):
            batches.append(numbers(iterator))
            snapshots.append(chainer.serializers.npz.serialize(iterator))
            np.random.permutation(10)  # as dropout does
        generator = np.random.RandomState(7)
        orders = np.concatenate([generator.permutation(10) for _ in range(3)])
        assert np.concatenate(batches).tolist() == orders.tolist()
        for i, saved in enumerate(snapshots[:8]):
            chainer.serializers.NpzDeserializer(saved).load(iterator)
            assert [numbers(iterator), numbers(iterator)] == batches[i + 1 : i + 3]


def test_data_set_that_raises_while_its_examples_are_measured() -> None:
    with (
        MultiprocessIterator({0: 0, 2: 2}, 2, shuffle=False) as iterator,
        pytest.raises(KeyError, match="1"),
    ):
        next(iterator)


def start(folder: Path) -> Job:
    script = folder / "script" / "probe.py"
    script.parent.mkdir()
    script.write_text(PROBE)
    (script.parent / "beside.py").touch()
    return Job(2, [script], cwd=hide_all_modules(folder))


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(job: Job) -> list[psutil.Process]:
    return [p for p in job.processes() if any(part.endswith(".py") for part in p.cmdline()[1:2])]


@pytest.mark.each_mpi
# One is written before the workers start, the other by a busy worker.
@pytest.mark.parametrize("announcement", ["ready.0", "worker"])
def test_workers_end_with_a_rank_that_is_killed(announcement: str, tmp_path: Path) -> None:
    job = start(tmp_path)
    wait_for((tmp_path / announcement).exists)
    os.kill(ranks_of(job)[0].pid, signal.SIGKILL)
    result = job.wait(LIMIT)
    assert not result.timed_out
    assert not result.left_behind
    assert result.returncode != 0


def test_workers_survive_a_signal_to_ranks_and_do_not_load_mpi(tmp_path: Path) -> None:
    job = start(tmp_path)
    wait_for((tmp_path / "worker").exists)
    for rank in ranks_of(job):
        for process in rank.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
    (tmp_path / "go on").touch()
    result = job.wait(LIMIT)
    assert (result.returncode, result.stderr) == (0, ""), result
    assert result.stdout.split() == ["fine", "fine"]
    assert not result.left_behind


@pytest.mark.each_mpi
def test_worker_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    job = start(tmp_path)
    worker = tmp_path / "worker"
    wait_for(lambda: worker.exists() and worker.read_text())
    os.kill(int(worker.read_text()), signal.SIGKILL)
    result = job.wait(LIMIT)
    assert not result.timed_out
    assert not result.left_behind
    assert result.returncode != 0
    assert re.search(r"chainermn: rank \d of 2 on .* failed", result.stderr)
    assert "was killed by SIGKILL" in result.stderr
