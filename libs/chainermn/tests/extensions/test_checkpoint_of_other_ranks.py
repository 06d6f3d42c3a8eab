"""Checkpoints written by a different number of ranks, or stored on other hosts."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.training import extensions

import chainermn
from chainermn.extensions import create_multi_node_checkpointer
from libs.chainermn.tests.extensions import training
from libs.chainermn.tests.extensions.training import counter

WRITERS = 3
#: How many ranks resume, in a world of four.
READERS = pytest.mark.parametrize("readers", [2, 4, 1])


@contextmanager
def first_ranks(world: Any, number: int) -> Iterator[Any]:
    """Give the first ranks a communicator and the others None; wait for all at the end."""
    part = world.split(0 if world.rank < number else 1, world.rank)
    yield part if world.rank < number else None
    world.allgather_obj(None)


def make_trainer(comm: Any, out: Path, iterations: int, order: str) -> Any:
    """Return a trainer over 12 examples and its checkpointer, which saves in each iteration."""
    trainer = training.make_trainer(comm, out, iterations, seed=iterations, order=order)
    checkpointer = create_multi_node_checkpointer("job", comm)
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    return trainer, checkpointer


def interrupted(comm: Any, out: Path, iterations: int, order: str) -> Any:
    """Train, keep the checkpoints and return the state."""
    trainer, checkpointer = make_trainer(comm, out, iterations, order)
    checkpointer.finalize = lambda: None
    trainer.run()
    return training.state_of(trainer)


def written(out: Path, iteration: int) -> list[int]:
    return sorted(int(file.name.split(".")[1]) for file in out.glob(f"job.*.{iteration}"))


@pytest.mark.mpi(4)
@READERS
@pytest.mark.parametrize("order", ["fixed", "shuffled", "sampled"])
def test_another_number_of_ranks_goes_on(readers: int, order: str, shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    state: Any = None
    with first_ranks(world, WRITERS) as comm:
        if comm:
            state = interrupted(comm, shared_tmp_path, 3, order)
    # Rank 0's state, with its batch statistics. The number of ranks is saved but not loaded.
    state = {**world.bcast_obj(state), "chainermn_ranks": readers}
    with first_ranks(world, readers) as comm:
        if comm is None:
            return
        trainer, checkpointer = make_trainer(comm, shared_tmp_path, 4, order)
        checkpointer.maybe_load(trainer)
        training.assert_same_state(training.state_of(trainer), state)
        updater = trainer.updater
        assert (updater.iteration, updater.epoch) == (3, 1)
        # Half an epoch, or less if a rank has an odd number of examples.
        position, length = {2: (3, 6), 4: (1, 3), 1: (6, 12)}[readers]
        iterator = updater.get_iterator("main")
        assert iterator.current_position == position
        assert updater.epoch_detail == 1 + position / length
        if order == "sampled":
            found = chainer.serializers.npz.serialize(iterator)["order"]
            np.testing.assert_array_equal(found, iterator.order_sampler.order(1))
        trainer.run()
        assert training.optimizer_of(trainer).t == state["t"] + 1
        comm.allgather_obj(None)
        assert not list(shared_tmp_path.glob("job.*"))  # not even those of ranks that are gone


def save(comm: Any, path: Path, iterations: list[int], differing: bool = False) -> None:
    checkpointer = create_multi_node_checkpointer("x", comm, path=path)
    for iteration in iterations:
        checkpointer.save(counter(iteration + (comm.rank if differing else 0)), iteration)


def load(comm: Any, path: Path) -> float:
    link = counter(-1)
    create_multi_node_checkpointer("x", comm, path=path).maybe_load(link)
    (value,) = set(link.x.array)
    return float(value)


@pytest.mark.mpi(4)
@READERS
@pytest.mark.parametrize("victim", range(WRITERS))
def test_newest_of_which_all_files_are_there(
    readers: int, victim: int, shared_tmp_path: Path
) -> None:
    world = chainermn.create_communicator("naive")
    with first_ranks(world, WRITERS) as comm:
        if comm:
            save(comm, shared_tmp_path, [1, 2, 10])
    if world.rank == 0:
        (shared_tmp_path / f"x.{victim}.10").unlink()
    with first_ranks(world, readers) as comm:
        if comm:
            has_own = comm.rank < WRITERS and comm.rank != victim
            message = rf"skipping checkpoint .*x\.{comm.rank}\.10: the other files of 3 ranks"
            with pytest.warns(UserWarning, match=message) if has_own else nullcontext():
                assert load(comm, shared_tmp_path) == 2


def damage(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[70] ^= 1  # past the header of the first array
    file.write_bytes(contents)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("victim", range(WRITERS))
def test_damaged_file_of_any_rank(victim: int, shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    with first_ranks(world, WRITERS) as comm:
        if comm:
            save(comm, shared_tmp_path, [1, 2])
    file = shared_tmp_path / f"x.{victim}.2"
    if world.rank == 0:
        damage(file)
    with first_ranks(world, 2) as comm:
        if comm:
            reads = comm.rank == victim % 2
            with pytest.warns(UserWarning, match="Bad CRC-32") if reads else nullcontext():
                assert load(comm, shared_tmp_path) == 1


@pytest.mark.mpi(4)
@pytest.mark.parametrize("is_empty", [False, True])
def test_damaged_file_that_a_larger_job_has_left(is_empty: bool, shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    save(world, shared_tmp_path, [1, 2])
    with first_ranks(world, 2) as comm:
        if comm:
            checkpointer = create_multi_node_checkpointer("x", comm, path=shared_tmp_path)
            checkpointer.save(counter(20), 2)
    file = shared_tmp_path / "x.3.2"
    if world.rank == 0:
        file.write_bytes(b"") if is_empty else damage(file)
    world.allgather_obj(None)
    message = r"skipping checkpoint .*x\.3\.2: "
    with pytest.warns(UserWarning, match=message) if world.rank == 3 else nullcontext():
        assert load(world, shared_tmp_path) == 20


@pytest.mark.mpi(4)
@pytest.mark.filterwarnings("ignore:skipping checkpoint")  # who warns depends on which is first
@pytest.mark.parametrize("victim", range(4))
def test_two_jobs_of_the_same_iteration(victim: int, shared_tmp_path: Path) -> None:
    """Each job has the folders of two hosts, and one job has a damaged file."""
    world = chainermn.create_communicator("naive")
    folder = shared_tmp_path / f"host{world.rank}"
    job = world.split(world.rank // 2, world.rank)
    checkpointer = create_multi_node_checkpointer("x", job, path=folder)
    checkpointer.save(counter(world.rank // 2), 1)
    if world.rank == victim:
        damage(folder / f"x.{job.rank}.1")
    assert load(world, folder) == 1 - victim // 2


@pytest.mark.mpi(4)
@READERS
def test_ranks_that_were_no_replicas(readers: int, shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    with first_ranks(world, WRITERS) as comm:
        if comm:
            save(comm, shared_tmp_path, [4], differing=True)
    with first_ranks(world, readers) as comm:
        if comm:
            expected = "written by 3 ranks that are not replicas: x differs between rank 0 and"
            with pytest.raises(ValueError, match=expected):
                load(comm, shared_tmp_path)
    with first_ranks(world, WRITERS) as comm:
        if comm:
            assert load(comm, shared_tmp_path) == 4 + comm.rank


@pytest.mark.mpi(4)
def test_models_of_different_parts(shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    with first_ranks(world, WRITERS) as comm:
        if comm:
            model = chainer.Chain(**{f"part{comm.rank}": counter(1)})
            create_multi_node_checkpointer("x", comm, path=shared_tmp_path).save(model, 1)
    with first_ranks(world, 2) as comm:
        if comm:
            model = chainer.Chain(**{f"part{comm.rank}": counter(0)})
            with pytest.raises(ValueError, match="not replicas: part0/x differs between rank 0"):
                create_multi_node_checkpointer("x", comm, path=shared_tmp_path).maybe_load(model)


@pytest.mark.mpi(3)
def test_parameter_without_an_array(shared_tmp_path: Path) -> None:
    """A layer that has not seen its input yet has such a parameter."""
    world = chainermn.create_communicator("naive")
    checkpointer = create_multi_node_checkpointer("x", world, path=shared_tmp_path)
    checkpointer.save(chainer.links.Linear(None, 2, initialW=1), 1)
    with first_ranks(world, 2) as comm:
        if comm:
            link = chainer.links.Linear(None, 2, initial_bias=5)
            create_multi_node_checkpointer("x", comm, path=shared_tmp_path).maybe_load(link)
            assert (link.b.array == 0).all()


@pytest.mark.mpi(4)
def test_folders_of_the_hosts(shared_tmp_path: Path) -> None:
    """Each rank has its own folder, and later the folder of another rank."""
    world = chainermn.create_communicator("naive")
    folders = [shared_tmp_path / f"host{rank}" for rank in range(4)]
    with first_ranks(world, WRITERS) as comm:
        if comm:
            save(comm, folders[comm.rank], [1, 2], differing=True)
    with first_ranks(world, WRITERS) as comm:
        if comm:
            assert load(comm, folders[(comm.rank + 1) % WRITERS]) == 2 + comm.rank
    # Rank 2's host is gone, and with it the files that only it had.
    with first_ranks(world, 2) as comm:
        if comm:
            with pytest.warns(UserWarning, match="the other files of 3 ranks are missing"):
                assert load(comm, folders[comm.rank]) == -1
    with first_ranks(world, WRITERS) as comm:
        if comm:
            save(comm, folders[comm.rank], [1, 2])
    assert load(world, folders[(world.rank + 1) % 4]) == 2


@pytest.mark.mpi(3)
def test_file_for_another_rank_that_cannot_be_read(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = chainermn.create_communicator("naive")
    folders = [shared_tmp_path / f"host{rank}" for rank in range(3)]
    save(world, folders[world.rank], [1])

    def read_bytes(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    if world.rank == 1:
        monkeypatch.setattr(Path, "read_bytes", read_bytes)
    expected = r"Input/output error: '.*/host2/x\.2\.1'"
    error: type[Exception] = OSError
    if world.rank != 1:
        error, expected = RuntimeError, rf"^maybe_load: rank 1: OSError: .*{expected}"
    with pytest.raises(error, match=expected):
        load(world, folders[(world.rank + 1) % 3])


@pytest.mark.mpi(4)
def test_files_of_two_runs_make_no_checkpoint(shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    for run in ("first", "second"):
        with first_ranks(world, WRITERS) as comm:
            if comm:
                save(comm, shared_tmp_path / run, [1, 2] if run == "first" else [2])
    if world.rank == 0:
        shutil.copy(shared_tmp_path / "second/x.1.2", shared_tmp_path / "first/x.1.2")
    for readers in (WRITERS, 4):
        with first_ranks(world, readers) as comm:
            if comm:
                with warned(readers != WRITERS and comm.rank < WRITERS):
                    assert load(comm, shared_tmp_path / "first") == 1


def warned(is_told: bool) -> AbstractContextManager[Any]:
    return pytest.warns(UserWarning, match="are missing") if is_told else nullcontext()


@pytest.mark.mpi(3)
def test_old_files_are_removed_with_those_of_ranks_that_are_no_more(
    shared_tmp_path: Path,
) -> None:
    world = chainermn.create_communicator("naive")
    save(world, shared_tmp_path, [1, 2])
    with first_ranks(world, 2) as comm:
        if comm:
            checkpointer = create_multi_node_checkpointer("x", comm, 2, 1, shared_tmp_path)
            checkpointer.save(counter(3), 3)
            comm.allgather_obj(None)
            assert len(list(shared_tmp_path.glob("x.*"))) == 8
            comm.allgather_obj(None)
            checkpointer.save(counter(4), 4)
            comm.allgather_obj(None)
            expected = [f"x.{rank}.{iteration}" for rank in (0, 1) for iteration in (3, 4)]
            assert sorted(file.name for file in shared_tmp_path.glob("x.*")) == expected


@pytest.mark.mpi(3)
def test_learning_rate_is_the_scripts(shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")

    def train(comm: Any, iterations: int) -> list[float]:
        trainer, checkpointer = make_trainer(comm, shared_tmp_path, iterations, "fixed")
        optimizer = training.optimizer_of(trainer)
        optimizer.alpha = 0.5 * comm.size
        optimizer.eps = 0.25 * comm.size
        trainer.extend(extensions.ExponentialShift("eps", 0.5), trigger=(2, "iteration"))
        checkpointer.maybe_load(trainer)
        checkpointer.finalize = lambda: None
        rates = []

        def look(_: Any) -> None:
            rates.append((optimizer.alpha, optimizer.eps))

        trainer.extend(look, trigger=(1, "iteration"), priority=400)  # what the step used
        trainer.run()
        return rates

    assert train(world, 3) == [(1.5, 0.75), (1.5, 0.75), (1.5, 0.375)]
    with first_ranks(world, 2) as comm:
        if comm:
            # Chainer's shifts save the value they set, and keep it until they set the next one.
            assert train(comm, 6) == [(1.0, 0.375), (1.0, 0.125), (1.0, 0.125)]
