"""What the error says when a snapshot from other ranks does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.training import StandardUpdater, Trainer, extensions

import chainermn
from chainermn.extensions import multi_node_snapshot
from chainermn.resuming import explain
from chainermn.testing.mpiexec import run_job

pytestmark = pytest.mark.each_mpi


def make_trainer(comm: Any, out: Path, n: int = 12, iterations: int = 1) -> Trainer:
    """Return a trainer with a shuffled iterator over this rank's part of ``n`` examples."""
    model = chainer.links.Classifier(chainer.links.Linear(1, 2))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)
    data = chainer.datasets.TupleDataset(np.zeros((n, 1), np.float32), np.zeros(n, np.int32))
    part = chainermn.scatter_dataset(data, comm)
    updater = StandardUpdater(chainer.iterators.SerialIterator(part, 2), optimizer)
    return Trainer(updater, (iterations, "iteration"), out=str(out))


def save(file: str | Path, trainer: Trainer) -> None:
    """Train and save the trainer."""
    trainer.run()
    chainer.serializers.save_npz(str(file), trainer)


def note_of_loading(file: Path, trainer: Trainer) -> str:
    """Return the note added to the error when loading fails."""
    with pytest.raises(ValueError, match="broadcast") as caught:
        chainer.serializers.load_npz(str(file), trainer)
    explain(caught.value)
    (note,) = caught.value.__notes__
    return note


@pytest.mark.mpi(2, 3)
def test_both_numbers_of_ranks_are_said(shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    alone = world.split(world.rank, 0)
    for writers, readers in ((world, alone), (alone, world)):
        file = shared_tmp_path / f"of {writers.size} by {world.rank}"
        save(file, make_trainer(writers, shared_tmp_path))
        note = note_of_loading(file, make_trainer(readers, shared_tmp_path))
        many = f"{world.size} ranks"
        expected = [f"a job of {many}, and this job has 1 rank. "]
        expected += [f"a job of 1 rank, and this job has {many}. "]
        assert expected[writers is alone] in note
        assert "chainermn.extensions.multi_node_snapshot(comm, " in note
        assert "give extensions.snapshot the filename= with which it was written" in note


@pytest.mark.mpi(2)
def test_snapshot_that_does_not_say_how_many_wrote_it(comm: Any, shared_tmp_path: Path) -> None:
    file = shared_tmp_path / f"old.{comm.rank}.npz"
    save(file, make_trainer(comm, shared_tmp_path, n=20))
    with np.load(file, allow_pickle=True) as saved:
        arrays = dict(saved)
    del arrays["updater/optimizer:main/chainermn_ranks"]
    np.savez(file, **arrays)
    note = note_of_loading(file, make_trainer(comm, shared_tmp_path))
    assert "a job with 10 examples on each rank; this job has 6. Either the number of " in note
    fitting = make_trainer(comm, shared_tmp_path, n=20)
    chainer.serializers.load_npz(str(file), fitting)
    assert fitting.updater.iteration == 1


@pytest.mark.mpi(1, 2)
def test_other_data_on_as_many_ranks(comm: Any, shared_tmp_path: Path) -> None:
    file = shared_tmp_path / f"other.{comm.rank}"
    size = comm.size
    save(file, make_trainer(comm, shared_tmp_path, n=20 * size))
    note = note_of_loading(file, make_trainer(comm, shared_tmp_path, n=6 * size))
    assert "with 20 examples on each rank; this job has 6, on the same number of ranks: " in note


@pytest.mark.mpi(1)
def test_other_errors_get_no_note(comm: Any, tmp_path: Path) -> None:
    chainer.serializers.save_npz(str(tmp_path / "model"), chainer.links.Linear(2, 3))
    for target in (chainer.links.Linear(2, 4), make_trainer(comm, tmp_path)):
        with pytest.raises((ValueError, KeyError)) as caught:
            chainer.serializers.load_npz(str(tmp_path / "model"), target)
        explain(caught.value)
        assert not hasattr(caught.value, "__notes__")


@pytest.mark.mpi(1, 2)
def test_optimizer_of_chainer_loads_what_a_multi_node_optimizer_saves(
    shared_tmp_path: Path,
) -> None:
    comm = chainermn.create_communicator("naive")
    trainer = make_trainer(comm, shared_tmp_path, iterations=3)
    trainer.run()
    saved = chainer.serializers.npz.serialize(trainer.updater.get_optimizer("main"))
    plain = chainer.optimizers.Adam().setup(chainer.links.Classifier(chainer.links.Linear(1, 2)))
    chainer.serializers.NpzDeserializer(saved).load(plain)
    assert plain.t == 2  # the first update of the three made the ranks equal


@pytest.mark.mpi(3)
@pytest.mark.filterwarnings("ignore:The previous value of .* is not saved")  # from the trigger
def test_renamed_it_is_loaded_by_another_number_of_ranks(shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    first = make_trainer(world, shared_tmp_path)
    if world.rank == 0:
        first.extend(extensions.snapshot(), trigger=(1, "iteration"))
    first.run()
    if world.rank == 0:
        file = shared_tmp_path / "snapshot_iter_1"
        file.rename(shared_tmp_path / "snapshot_iter_1.0")
    part = world.split(int(world.rank == 2), world.rank)
    second = make_trainer(part, shared_tmp_path, iterations=3)
    snapshot = multi_node_snapshot(part, extensions.snapshot(autoload=True), [])
    second.extend(snapshot, trigger=(1, "iteration"))
    world.allgather_obj(None)
    snapshot.initialize(second)
    assert second.updater.iteration == 1


JOB = """
import sys
sys.path.insert(0, {folder!r})
import chainer, chainermn, test_resuming
comm = chainermn.create_communicator("naive")
file = f"snapshot{{comm.rank}}"
test_resuming.save(file, test_resuming.make_trainer(comm, "."))
alone = comm.split(comm.rank, 0)
chainer.serializers.load_npz(file, test_resuming.make_trainer(alone, "."))
"""


def test_job_says_it_when_it_fails(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(JOB.format(folder=str(Path(__file__).parent)))
    result = run_job(2, [script], cwd=tmp_path).check(fails=True)
    assert "This snapshot was written by a job of 2 ranks, and this job has 1 rank. " in (
        result.stderr
    )


@pytest.mark.mpi(2)
def test_sets_of_which_some_have_no_snapshot(comm: Any, shared_tmp_path: Path) -> None:
    def initialize(sets: list[int]) -> int:
        trainer = make_trainer(comm, shared_tmp_path)
        snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), sets)
        trainer.extend(snapshot, trigger=(1, "iteration"))
        snapshot.initialize(trainer)
        return int(trainer.updater.iteration)

    first = make_trainer(comm, shared_tmp_path)
    first.extend(multi_node_snapshot(comm, extensions.snapshot(), []), trigger=(1, "iteration"))
    first.run()
    comm.allgather_obj(None)
    assert initialize([]) == 1
    if comm.rank == 0:
        with pytest.warns(UserWarning, match=r"nothing is loaded .* 1 by rank 0, 0 by rank 1\."):
            assert initialize([0]) == 0
    else:
        assert initialize([0]) == 0
