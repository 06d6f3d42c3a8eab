"""Snapshots shared by sets of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.training import extensions

import chainermn
from chainermn.extensions import multi_node_snapshot
from libs.chainermn.tests.extensions import training


@pytest.mark.mpi(4)
@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([], [{0, 1, 2, 3}]),
        ([0], [{0}, {1, 2, 3}]),
        ([0, 1], [{0}, {1}, {2, 3}]),
        ([[0, 1], [2, 3]], [{0, 1}, {2, 3}]),
        ([range(0, 4, 2)], [{0, 2}, {1, 3}]),
        ([{3}, (0, 2, 1)], [{3}, {0, 1, 2}]),
    ],
)
def test_replica_sets(comm: Any, sets: Any, expected: Any) -> None:
    shared = multi_node_snapshot(comm, extensions.snapshot(), sets)
    (own,) = (ranks for ranks in expected if comm.rank in ranks)
    assert (shared.replica_set, shared.master) == (own, min(own))


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("sets", [[0, 0], [7], [[0, 1], [1, 2]], [[]], [-1]])
def test_sets_that_are_none(comm: Any, sets: Any) -> None:
    with pytest.raises(ValueError, match="disjoint sets of ranks"):
        multi_node_snapshot(comm, extensions.snapshot(), sets)


@pytest.mark.mpi(3)
def test_sets_that_differ(comm: Any) -> None:
    with pytest.raises(ValueError, match=r"rank 0: replica_sets=\[\[0, 1, 2\]\]; rank 1: "):
        multi_node_snapshot(comm, extensions.snapshot(), [0] if comm.rank else [])
    with pytest.raises(TypeError):
        multi_node_snapshot(comm, extensions.snapshot(), None)  # type: ignore[arg-type]


def run(comm: Any, out: Path, iterations: int, sets: Any, **snapshot: Any) -> Any:
    trainer = training.make_trainer(comm, out, iterations, seed=iterations)
    if comm.rank == 0 and sets:
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(
        multi_node_snapshot(comm, extensions.snapshot(**snapshot), sets), trigger=(1, "iteration")
    )
    trainer.run()
    comm.allgather_obj(None)
    return trainer


def snapshots(out: Path) -> list[str]:
    return sorted(file.name for file in out.iterdir() if file.name.startswith("snap"))


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("sets", [[], [0], [[0, 1]]])
def test_write_and_resume(comm: Any, sets: Any, shared_tmp_path: Path) -> None:
    if comm.size == 1:
        sets = []
    masters = {0, *(m for m in [1 if sets == [0] else 2] if sets and m < comm.size)}
    first = run(comm, shared_tmp_path, 3, sets, autoload=True)
    expected = [f"snapshot_iter_{i}.{rank}" for i in (1, 2, 3) for rank in sorted(masters)]
    assert snapshots(shared_tmp_path) == expected
    resumed = training.make_trainer(comm, shared_tmp_path, 3, seed=9)
    if comm.rank == 0 and sets:
        resumed.extend(extensions.LogReport(trigger=(1, "iteration")))
    shared = multi_node_snapshot(comm, extensions.snapshot(autoload=True), sets)
    assert shared.is_master == (comm.rank in masters)
    resumed.extend(shared, trigger=(1, "iteration"))
    shared.initialize(resumed)
    assert resumed.updater.iteration == 3
    # Each rank has its own batch statistics.
    training.assert_same_state(training.state_of(resumed), training.state_of(first))


@pytest.mark.mpi(3)
@pytest.mark.parametrize("sets", [[], [0]])
def test_resume_with_another_number_of_ranks(sets: Any, shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    run(world, shared_tmp_path, 2, sets)
    part = world.split(0 if world.rank < 2 else 1, world.rank)
    if world.rank < 2:
        resumed = run(part, shared_tmp_path, 4, sets, autoload=True)
        assert resumed.updater.iteration == 4
        assert training.optimizer_of(resumed).t == 3  # the very first update only synchronized
    world.allgather_obj(None)


@pytest.mark.mpi(3)
def test_shuffled_iterator_goes_on_with_another_number_of_ranks(shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")

    def positions(comm: Any, iterations: int) -> list[tuple[int, int]]:
        trainer = training.make_trainer(comm, shared_tmp_path, iterations, order="shuffled")
        iterator = trainer.updater.get_iterator("main")
        snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [])
        trainer.extend(snapshot, trigger=(1, "iteration"))
        seen = []

        trainer.extend(lambda _: seen.append((iterator.epoch, iterator.current_position)), "look")
        trainer.run()
        return seen

    assert positions(world, 1) == [(0, 2)]  # of each rank's 4 examples
    part = world.split(0 if world.rank < 2 else 1, world.rank)
    if world.rank < 2:
        assert positions(part, 4) == [(0, 5), (1, 1), (1, 3)]  # resumed from 3 of 6
    world.allgather_obj(None)


@pytest.mark.mpi(3)
@pytest.mark.parametrize(("ranks", "epochs"), [(2, [0, 1, 1, 1, 2]), (3, [1, 1, 2, 2, 3])])
def test_every_rank_goes_on_with_its_own_part_of_a_sampler(
    ranks: int, epochs: list[int], shared_tmp_path: Path
) -> None:
    world = chainermn.create_communicator("naive")

    def train(comm: Any, iterations: int) -> tuple[list[list[int]], Any]:
        """Return the order of examples after each iteration, and the sampler behind it."""
        trainer = training.make_trainer(comm, shared_tmp_path, iterations, order="sampled")
        iterator = trainer.updater.get_iterator("main")
        snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [])
        trainer.extend(snapshot, trigger=(1, "iteration"))
        orders: list[list[int]] = []

        def look(_: Any) -> None:
            orders.append(chainer.serializers.npz.serialize(iterator)["order"].tolist())

        trainer.extend(look, trigger=(1, "iteration"))
        trainer.run()
        return orders, iterator.order_sampler

    train(world, 1)  # half of the first epoch: 2 of 4 examples
    part = world.split(0 if world.rank < ranks else 1, world.rank)
    if world.rank < ranks:
        orders, sampler = train(part, 6)
        assert orders == [sampler.order(epoch).tolist() for epoch in epochs]
    world.allgather_obj(None)


@pytest.mark.mpi(3)
def test_newest_snapshot_that_all_sets_can_read(comm: Any, shared_tmp_path: Path) -> None:
    run(comm, shared_tmp_path, 4, [0])
    if comm.rank == 0:
        os.remove(shared_tmp_path / "snapshot_iter_4.1")
        damaged = shared_tmp_path / "snapshot_iter_3.1"
        damaged.write_bytes(damaged.read_bytes()[:-100])
    comm.allgather_obj(None)
    resumed = training.make_trainer(comm, shared_tmp_path, 9)
    if comm.rank == 0:
        resumed.extend(extensions.LogReport(trigger=(1, "iteration")))
    shared = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [0])
    resumed.extend(shared, trigger=(1, "iteration"))
    if comm.rank == 1:
        with pytest.warns(UserWarning, match="skipping snapshot"):
            shared.initialize(resumed)
    else:
        shared.initialize(resumed)
    assert resumed.updater.iteration == 2


@pytest.mark.mpi(1, 2)
def test_snapshot_of_another_model(comm: Any, shared_tmp_path: Path) -> None:
    run(comm, shared_tmp_path, 2, [])
    other = training.make_trainer(comm, shared_tmp_path, 2, width=5)
    shared = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [])
    other.extend(shared, trigger=(1, "iteration"))
    with pytest.raises(ValueError, match="broadcast"):
        shared.initialize(other)


@pytest.mark.mpi(1, 2)
def test_resume_before_the_first_step(comm: Any, shared_tmp_path: Path) -> None:
    first = run(comm, shared_tmp_path, 1, [])
    assert training.optimizer_of(first).t == 0
    resumed = run(comm, shared_tmp_path, 3, [], autoload=True)
    assert training.optimizer_of(resumed).t == 2


@pytest.mark.mpi(1, 2)
def test_nothing_to_load(comm: Any, shared_tmp_path: Path) -> None:
    out = shared_tmp_path / "new"
    trainer = run(comm, out, 2, [], autoload=True, n_retains=1)
    assert trainer.updater.iteration == 2
    assert snapshots(out) == ["snapshot_iter_2.0"]


@pytest.mark.mpi(1, 2)
def test_filename_that_is_a_function(comm: Any, shared_tmp_path: Path) -> None:
    run(comm, shared_tmp_path, 1, [], filename=lambda trainer: "snap")
    assert snapshots(shared_tmp_path) == ["snap.0"]
    shared = multi_node_snapshot(
        comm, extensions.snapshot(filename=lambda trainer: "snap", autoload=True), []
    )
    with pytest.raises(TypeError, match="filename is a string"):
        shared.initialize(training.make_trainer(comm, shared_tmp_path, 1))


@pytest.mark.mpi(1, 3)
def test_object_and_fixed_filename(comm: Any, shared_tmp_path: Path) -> None:
    def snapshot(trainer: Any) -> Any:
        target = training.optimizer_of(trainer).target
        return multi_node_snapshot(
            comm, extensions.snapshot_object(target, "model", autoload=True), []
        )

    first = training.make_trainer(comm, shared_tmp_path, 2)
    first.extend(snapshot(first), trigger=(2, "iteration"))
    first.run()
    comm.allgather_obj(None)
    assert (shared_tmp_path / "model.0").exists()
    second = training.make_trainer(comm, shared_tmp_path, 2, seed=9)
    snapshot(second).initialize(second)
    assert second.updater.iteration == 0
    own = training.optimizer_of(second).target.predictor[0].W.array
    np.testing.assert_array_equal(own, training.optimizer_of(first).target.predictor[0].W.array)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("on_error", [True, False])
def test_snapshot_of_what_was_there_when_an_error_came(
    comm: Any, on_error: bool, shared_tmp_path: Path
) -> None:
    trainer = training.make_trainer(comm, shared_tmp_path, 4)
    snapshot = extensions.snapshot(snapshot_on_error=on_error)
    trainer.extend(multi_node_snapshot(comm, snapshot, []), trigger=(9, "iteration"))
    training.run_until_it_fails(trainer, 2)
    comm.allgather_obj(None)
    assert snapshots(shared_tmp_path) == (["snapshot_iter_2.0"] if on_error else [])


def settled(
    comm: Any, out: Path, iterations: int, settings: Any, sets: Any = ()
) -> tuple[Any, Any]:
    """Return a trainer whose model depends on random numbers, and its snapshot."""
    trainer = training.make_trainer(comm, out, iterations, seed=7)

    def disturb(trainer: chainer.training.Trainer) -> None:
        bias = training.optimizer_of(trainer).target.predictor[2].b.array
        if comm.rank == 0:
            bias += np.random.normal(size=bias.shape)
        comm.bcast_data(training.optimizer_of(trainer).target)

    trainer.extend(disturb, trigger=(1, "iteration"))
    snapshot = multi_node_snapshot(comm, extensions.snapshot(), sets, settings=settings)
    trainer.extend(snapshot, trigger=(1, "iteration"))
    return trainer, snapshot


@pytest.mark.mpi(3)
def test_resumed_run_of_two_sets_draws_the_numbers_of_one_never_interrupted(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, sets = shared_tmp_path, [0]
    whole, _ = settled(comm, out / "whole", 6, {"lr": 0.1}, sets)
    whole.run()
    part, snapshot = settled(comm, out / "part", 4, {"lr": 0.1}, sets)
    assert not snapshot.resume(part)
    part.run()
    comm.allgather_obj(None)
    capsys.readouterr()
    resumed, snapshot = settled(comm, out / "part", 6, {"lr": 0.1}, sets)
    np.random.seed(99)
    assert snapshot.resume(resumed)
    said = f"resuming after iteration 4, epoch 2, from {out}/part/snapshot_iter_4.0\n"
    assert capsys.readouterr().out == (said if comm.rank == 0 else "")
    resumed.run()
    training.assert_same_state(training.state_of(resumed), training.state_of(whole))


@pytest.mark.mpi(1, 2)
def test_run_with_other_settings_is_left_alone(comm: Any, shared_tmp_path: Path) -> None:
    out = shared_tmp_path
    settled(comm, out, 3, {"lr": 0.1, "unit": 3})[0].run()
    comm.allgather_obj(None)
    trainer, snapshot = settled(comm, out, 2, {"lr": 0.2, "unit": 3})
    expected = (
        rf"{out}/snapshot_iter_3\.0 was written with other settings \(lr: 0\.1, now 0\.2\)\. Use "
        f"the same settings to resume that run, or a folder other than {out} for a new one"
    )
    with pytest.raises(ValueError, match=expected):
        snapshot.resume(trainer)
    assert trainer.updater.iteration == 0
    trainer, snapshot = settled(comm, out, 9, {"unit": 3, "lr": 0.1})
    assert snapshot.resume(trainer)
    trainer, snapshot = settled(comm, out, 9, None)
    assert snapshot.resume(trainer)  # without settings, the newest
    assert trainer.updater.iteration == 3


@pytest.mark.mpi(1, 2)
def test_snapshot_without_settings_is_of_another_run(comm: Any, shared_tmp_path: Path) -> None:
    run(comm, shared_tmp_path, 1, [])
    trainer, snapshot = settled(comm, shared_tmp_path, 2, {})
    with pytest.raises(ValueError, match="does not have the settings of its run"):
        snapshot.resume(trainer)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize(("iterations", "ended"), [(3, 4), (4, 4), (6, 6)])
def test_run_that_has_ended_is_not_trained_on(
    iterations: int,
    ended: int,
    shared_tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    comm = chainermn.create_communicator("naive")
    settled(comm, shared_tmp_path, 4, {})[0].run()
    comm.allgather_obj(None)
    trainer, snapshot = settled(comm, shared_tmp_path, iterations, {})
    capsys.readouterr()
    assert snapshot.resume(trainer)
    out, err = capsys.readouterr()
    said = "Training has ended there, after 4 iterations: ask for more" in err
    assert said == (comm.rank == 0 and iterations <= 4)
    assert ("resuming after iteration 4" in out) == (comm.rank == 0 and iterations > 4)
    trainer.run()
    assert trainer.updater.iteration == ended


@pytest.mark.mpi(1, 2)
def test_what_a_killed_job_was_writing_is_removed(comm: Any, shared_tmp_path: Path) -> None:
    names = ["tmpsnapshot_iter_3.0q7x", "tmpmodel.npz", "snapshot_iter_3"]
    if comm.rank == 0:
        for name in names:
            (shared_tmp_path / name).mkdir()
            (shared_tmp_path / name / "file").touch()
    comm.allgather_obj(None)
    trainer, snapshot = settled(comm, shared_tmp_path, 2, {})
    assert not snapshot.resume(trainer)
    assert sorted(path.name for path in shared_tmp_path.glob("[!.]*")) == sorted(names[1:])


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("sets", [[], [0]])
def test_resume_from_a_given_file(
    comm: Any, sets: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [] if comm.size == 1 else sets
    settled(comm, shared_tmp_path / "old", 3, {"lr": 0.1}, sets)[0].run()
    comm.allgather_obj(None)
    trainer, snapshot = settled(comm, shared_tmp_path / "new", 3, {"lr": 0.2}, sets)
    assert snapshot.resume(trainer, shared_tmp_path / "old/snapshot_iter_3.0")
    assert trainer.updater.iteration == 3
    ending = (
        ". Training has ended there, after 3 iterations: ask for more, or use a folder "
        f"other than {shared_tmp_path}/new to start over\n"
    )
    assert capsys.readouterr().err.endswith(ending) == (comm.rank == 0)
    if len(snapshot.replica_set) == comm.size:  # whatever its name
        file = shared_tmp_path / "kept_0.9"
        if comm.rank == 0:
            file.write_bytes((shared_tmp_path / "old/snapshot_iter_3.0").read_bytes())
        comm.allgather_obj(None)
        assert snapshot.resume(trainer, file)


@pytest.mark.mpi(1, 2)
def test_file_that_cannot_be_resumed_from(comm: Any, shared_tmp_path: Path) -> None:
    trainer, snapshot = settled(comm, shared_tmp_path, 3, {})
    path = shared_tmp_path / "snapshot_iter_9.0"
    with pytest.raises((FileNotFoundError, RuntimeError), match=r"snapshot_iter_9\.0"):
        snapshot.resume(trainer, path)
    if comm.rank == 0:
        path.write_bytes(b"no snapshot")
    comm.allgather_obj(None)
    with pytest.raises((OSError, RuntimeError), match=r"snapshot_iter_9\.0 is not an NPZ file"):
        snapshot.resume(trainer, path)


@pytest.mark.mpi(2)
def test_invalid_settings(comm: Any) -> None:
    with pytest.raises(ValueError, match=r'rank 0: settings=\{"lr": 0\}; rank 1: .*1\}'):
        multi_node_snapshot(comm, extensions.snapshot(), [], settings={"lr": comm.rank})
    with pytest.raises(TypeError, match="not JSON serializable"):
        multi_node_snapshot(comm, extensions.snapshot(), [], settings={"lr": comm})
    model = chainer.links.Bias(0, ())
    with pytest.raises(ValueError, match="snapshots of the whole trainer"):
        multi_node_snapshot(comm, extensions.snapshot_object(model, "m"), [], settings={})
