"""From which file a run resumes, which files it deletes, and what it says about them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.training import extensions

import chainermn
from chainermn.extensions import multi_node_snapshot
from chainermn.extensions.folder_lock import FolderLock
from libs.chainermn.tests.extensions import training

Capture = pytest.CaptureFixture[str]


def make(
    comm: Any, out: Path, iterations: int, settings: Any = None, **snapshot: Any
) -> tuple[Any, Any]:
    trainer = training.make_trainer(comm, out, iterations)
    shared = multi_node_snapshot(comm, extensions.snapshot(**snapshot), [], settings=settings)
    trainer.extend(shared, trigger=(1, "iteration"))
    return trainer, shared


def run(comm: Any, out: Path, iterations: int, settings: Any = None, **snapshot: Any) -> None:
    trainer, shared = make(comm, out, iterations, settings, **snapshot)
    shared.resume(trainer)
    trainer.run()
    comm.allgather_obj(None)


def set_times(comm: Any, folder: Path, time_of: Callable[[int], float]) -> None:
    """Set the times of snapshots, by their iteration."""
    if comm.rank == 0:
        for file in folder.glob("snapshot_iter_*"):
            iteration = int(file.name.split("_")[-1].split(".")[0])
            os.utime(file, (time_of(iteration), time_of(iteration)))
    comm.allgather_obj(None)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))


@pytest.mark.mpi(3)
@pytest.mark.parametrize("by_itself", [True, False])
def test_furthest_of_the_same_settings_whatever_the_times(
    comm: Any, by_itself: bool, shared_tmp_path: Path, capfd: Capture
) -> None:
    run(comm, shared_tmp_path, 3, {"lr": 0.1})
    other, _ = make(comm, shared_tmp_path / "other", 5, {"lr": 0.2})
    other.run()
    comm.allgather_obj(None)
    if comm.rank == 0:
        file = shared_tmp_path / "other" / "snapshot_iter_5.0"
        file.rename(shared_tmp_path / file.name)
    comm.allgather_obj(None)
    set_times(comm, shared_tmp_path, lambda iteration: 4e9 - iteration)  # in the future
    trainer, shared = make(comm, shared_tmp_path, 9, {"lr": 0.1}, autoload=by_itself)
    capfd.readouterr()
    if by_itself:
        shared.initialize(trainer)
    else:
        assert shared.resume(trainer)
    assert trainer.updater.iteration == 3
    assert "note" not in capfd.readouterr().err


@pytest.mark.mpi(2)
def test_without_settings_the_latest_and_a_note(
    comm: Any, shared_tmp_path: Path, capfd: Capture
) -> None:
    run(comm, shared_tmp_path, 3)
    set_times(comm, shared_tmp_path, lambda iteration: 1e9 + (iteration == 2))
    trainer, shared = make(comm, shared_tmp_path, 9)
    capfd.readouterr()
    assert shared.resume(trainer)
    assert trainer.updater.iteration == 2
    said = "snapshot_iter_2 of iteration 2, but snapshot_iter_3 is of iteration 3" in (
        capfd.readouterr().err
    )
    assert said == (comm.rank == 0)


@pytest.mark.mpi(2)
def test_own_files_are_retained_whatever_lies_there(comm: Any, shared_tmp_path: Path) -> None:
    run(comm, shared_tmp_path, 3, {"lr": 1})
    set_times(comm, shared_tmp_path, lambda iteration: 4e9)
    old = names(shared_tmp_path)
    new = "new_{.updater.iteration}"
    run(comm, shared_tmp_path, 4, {"lr": 2}, filename=new, n_retains=2)
    assert names(shared_tmp_path) == ["new_3.0", "new_4.0", *old]
    run(comm, shared_tmp_path, 5, {"lr": 2}, filename=new, n_retains=2)
    assert names(shared_tmp_path) == ["new_4.0", "new_5.0", *old]
    run(comm, shared_tmp_path, 6, {"lr": 1}, n_retains=2)  # resumed from 3
    latest = ["snapshot_iter_5.0", "snapshot_iter_6.0"]
    assert names(shared_tmp_path) == ["new_4.0", "new_5.0", *old[:2], *latest]


@pytest.mark.mpi(3)
def test_another_number_of_ranks_is_said(shared_tmp_path: Path, capfd: Capture) -> None:
    world = chainermn.create_communicator("naive")
    run(world, shared_tmp_path, 2)
    part = world.split(0 if world.rank < 2 else 1, world.rank)
    capfd.readouterr()
    if world.rank < 2:
        run(part, shared_tmp_path, 3)
        err = capfd.readouterr().err
        assert ("was written by 3 ranks: 2 ranks divide the rest of the epoch" in err) == (
            part.rank == 0
        )
    world.allgather_obj(None)


@pytest.mark.mpi(1, 2)
def test_file_of_an_error_is_said(comm: Any, shared_tmp_path: Path, capfd: Capture) -> None:
    trainer = training.make_trainer(comm, shared_tmp_path, 4)
    snapshot = extensions.snapshot(snapshot_on_error=True)
    trainer.extend(multi_node_snapshot(comm, snapshot, []), trigger=(9, "iteration"))
    training.run_until_it_fails(trainer, 2)
    comm.allgather_obj(None)
    again, shared = make(comm, shared_tmp_path, 4)
    capfd.readouterr()
    assert shared.resume(again)
    said = "holds what ranks [0] had of their own" in capfd.readouterr().err
    assert said == (comm.rank == 0 and comm.size > 1)


class Elsewhere(chainer.dataset.Iterator):
    epoch, is_new_epoch = 0, False

    def __init__(self, data: Any) -> None:
        self.dataset = data

    def __next__(self) -> Any:
        return self.dataset[:2]


class Noisy:
    def __init__(self, data: Any) -> None:
        self.data, self.noise = data, np.random.RandomState(0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        return self.data[i]


def threads(data: Any, sampler: Any = None) -> Any:
    return chainer.iterators.MultithreadIterator(data, 2, order_sampler=sampler)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("make_iterator", "optimizer", "said"),
    [
        (lambda data: chainer.iterators.SerialIterator(Noisy(data), 2), {}, ""),
        (threads, {}, ""),
        (Elsewhere, {}, "iterator 'main': Elsewhere does not save its position"),
        (lambda data: threads(Noisy(data)), {}, "the generator 'noise' of its data set"),
        (
            lambda data: threads(data, lambda order, _: order[::-1].copy()),
            {},
            "MultithreadIterator calls function in advance",
        ),
        (threads, {"double_buffering": True}, "double_buffering drops the gradients in flight"),
    ],
)
def test_what_will_not_be_the_same_is_said(
    comm: Any,
    make_iterator: Any,
    optimizer: Any,
    said: str,
    shared_tmp_path: Path,
    capfd: Capture,
) -> None:
    np.random.seed(0)
    model = chainer.links.Classifier(chainer.links.Linear(2, 1), chainer.functions.squared_error)
    model.compute_accuracy = False
    rule = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **optimizer)
    x = np.ones((4, 2), np.float32)
    data = chainer.datasets.TupleDataset(x, x[:, :1])
    iterator = make_iterator(data)
    updater = chainer.training.StandardUpdater(
        iterator,
        rule.setup(model),
        loss_func=lambda x, t: chainer.functions.sum(model.predictor(x)),
    )
    trainer = chainer.training.Trainer(updater, (2, "iteration"), out=str(shared_tmp_path))
    snapshot = multi_node_snapshot(comm, extensions.snapshot(), [], settings={"said": said})
    trainer.extend(snapshot, trigger=(1, "iteration"))
    capfd.readouterr()
    trainer.run()
    lines = [line for line in capfd.readouterr().err.splitlines() if "every bit" in line]
    assert len(lines) == bool(said and comm.rank == 0)
    assert all(said in line for line in lines)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("instead", ["ThreadWriter", "ThreadQueueWriter"])
def test_writer_that_starts_processes_on_one_rank_raises_on_all(comm: Any, instead: str) -> None:
    name = instead.replace("Thread", "Process") if comm.rank == 1 else instead
    snapshot = extensions.snapshot(writer=getattr(extensions.snapshot_writers, name)())
    with pytest.raises(ValueError, match=rf"is a Process.*; use {instead} instead"):
        multi_node_snapshot(comm, snapshot, [])


@pytest.mark.mpi(2)
def test_path_comes_before_autoload(comm: Any, shared_tmp_path: Path) -> None:
    run(comm, shared_tmp_path, 4, {})
    trainer, shared = make(comm, shared_tmp_path, 3, {}, autoload=True)
    assert shared.resume(trainer, shared_tmp_path / "snapshot_iter_2.0")
    trainer.run()
    assert trainer.updater.iteration == 3


@pytest.mark.mpi(2)
def test_copy_of_a_file_is_not_deleted(comm: Any, shared_tmp_path: Path) -> None:
    run(comm, shared_tmp_path, 3, {}, n_retains=2)
    if comm.rank == 0:
        shutil.copy(shared_tmp_path / "snapshot_iter_2.0", shared_tmp_path / "snapshot_iter_0.0")
    comm.allgather_obj(None)
    run(comm, shared_tmp_path, 6, {}, n_retains=2)
    assert names(shared_tmp_path) == [f"snapshot_iter_{n}.0" for n in (0, 5, 6)]


@pytest.mark.mpi(2)
def test_two_snapshots_with_settings_of_their_own(comm: Any, shared_tmp_path: Path) -> None:
    def make_both() -> tuple[Any, Any]:
        trainer = training.make_trainer(comm, shared_tmp_path, 2)
        both = [
            multi_node_snapshot(comm, extensions.snapshot(filename=name), [], settings={name: 1})
            for name in ("a{.updater.iteration}", "b{.updater.iteration}")
        ]
        for name, shared in zip("ab", both, strict=True):
            trainer.extend(shared, name, trigger=(1, "iteration"))
        return trainer, both

    trainer, _ = make_both()
    trainer.run()
    comm.allgather_obj(None)
    for index in range(2):
        trainer, both = make_both()
        assert both[index].resume(trainer)
        assert trainer.updater.iteration == 2


@pytest.mark.mpi(2)
def test_writing_that_fails_raises_on_all_and_unlocks(comm: Any, shared_tmp_path: Path) -> None:
    def fail(path: str, arrays: Any) -> None:
        raise OSError("the disk is full")

    trainer = training.make_trainer(comm, shared_tmp_path, 2)
    writer = extensions.snapshot_writers.ThreadWriter(savefun=fail)
    model = training.optimizer_of(trainer).target
    snapshot = extensions.snapshot_object(model, "model", writer=writer)
    shared = multi_node_snapshot(comm, snapshot, [])
    shared.initialize(trainer)
    shared(trainer)
    with pytest.raises((OSError, RuntimeError), match="the disk is full"):
        shared.wait()
    shared(trainer)
    if comm.rank == 0:
        with pytest.raises(OSError, match="the disk is full"):
            shared.finalize()
    else:
        shared.finalize()
    lock = FolderLock(comm, "model")
    lock.acquire(shared_tmp_path, seconds=0)
    lock.release()
