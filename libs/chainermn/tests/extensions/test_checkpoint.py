"""Checkpoints that survive whatever happens to jobs and files."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import psutil
import pytest

import chainermn
from chainermn.extensions import create_multi_node_checkpointer
from chainermn.testing.mpiexec import Job, run_job
from libs.chainermn.tests.extensions import training
from libs.chainermn.tests.extensions.training import counter

HERE = Path(__file__).parent


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.suffix != ".lock")


@contextmanager
def in_turn(comm: Any) -> Iterator[None]:
    """Make all ranks wait for each other before and after the block."""
    comm.allgather_obj(None)
    yield
    comm.allgather_obj(None)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("name", ["plain", "dotted.name.0", "dotted.name.0.7"])
def test_newest_checkpoint_is_loaded(comm: Any, name: str, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "new" / "directory"
    checkpointer = create_multi_node_checkpointer(name, comm, path=path)
    other = create_multi_node_checkpointer("dotted", comm, path=path)
    for iteration in (1, 2, 10):
        checkpointer.save(counter(iteration * 100 + comm.rank), iteration)
    other.save(counter(-1), 11)
    resumed = counter()
    create_multi_node_checkpointer(name, comm, path=path).maybe_load(resumed)
    assert (resumed.x.array == 1000 + comm.rank).all()
    expected = [f"{name}.{rank}.{i}" for i in (1, 2, 10) for rank in range(comm.size)]
    expected += [f"dotted.{rank}.11" for rank in range(comm.size)]
    assert files(path) == sorted(expected)


@pytest.mark.mpi(1, 3)
def test_compressed_or_not_a_checkpoint_is_loaded(comm: Any, shared_tmp_path: Path) -> None:
    """Checkpoints are not compressed; those of earlier versions were."""
    checkpointer = create_multi_node_checkpointer("x", comm, path=shared_tmp_path)
    checkpointer.save(counter(7), 1)
    file = shared_tmp_path / f"x.{comm.rank}.1"
    with zipfile.ZipFile(file) as archive:
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_STORED}
    arrays = dict(np.load(file))
    with in_turn(comm), file.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    resumed = counter()
    create_multi_node_checkpointer("x", comm, path=shared_tmp_path).maybe_load(resumed)
    assert (resumed.x.array == 7).all()


@pytest.mark.mpi(1, 2)
def test_resumed_run_shuffles_like_one_never_interrupted(comm: Any, shared_tmp_path: Path) -> None:
    def train(folder: str, iterations: int, seed: int) -> Any:
        trainer = training.make_trainer(
            comm, shared_tmp_path, iterations, seed=seed, order="shuffled"
        )
        path = shared_tmp_path / folder
        checkpointer = create_multi_node_checkpointer("x", comm, path=path)
        checkpointer.maybe_load(trainer)
        trainer.run()
        checkpointer(trainer)
        return training.state_of(trainer)

    whole = train("whole", 11, seed=0)
    train("part", 4, seed=0)
    training.assert_same_state(train("part", 11, seed=9), whole)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(("keep", "more"), [(2, 2), (1, 0), (3, 1)])
def test_garbage_collection(comm: Any, keep: int, more: int, shared_tmp_path: Path) -> None:
    checkpointer = create_multi_node_checkpointer("x", comm, keep, more, shared_tmp_path)
    kept: list[int] = []
    for iteration in range(1, 12):
        checkpointer.save(counter(iteration), iteration)
        kept.append(iteration)
        if len(kept) > keep + more:
            kept = kept[-keep:]
        with in_turn(comm):
            expected = sorted(f"x.{rank}.{i}" for i in kept for rank in range(comm.size))
            assert files(shared_tmp_path) == expected


@pytest.mark.mpi(1, 3)
def test_finalize_removes_what_is_left(comm: Any, shared_tmp_path: Path) -> None:
    (shared_tmp_path / "x.0.notes").touch()
    checkpointer = create_multi_node_checkpointer("x", comm, path=shared_tmp_path)
    assert checkpointer.get_stats() == "No snapshot was taken"
    checkpointer.save(counter(), 5)
    assert checkpointer.get_stats().startswith("Snapshot duration stats (sec): avg=0.")
    with in_turn(comm):
        checkpointer.finalize()
    assert files(shared_tmp_path) == ["x.0.notes"]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def flip_a_bit(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[190] ^= 1  # in the first array, past its header
    file.write_bytes(contents)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def replace_by_text(file: Path) -> None:
    file.write_text("not a checkpoint")


def replace_by_snapshot(file: Path) -> None:
    with file.open("wb") as stream:
        chainer.serializers.save_npz(stream, counter(-5))


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_another_size(file: Path) -> None:
    arrays = dict(np.load(file))
    arrays["chainermn_checkpoint"][0] += 1
    with file.open("wb") as stream:
        np.savez(stream, **arrays)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(
    "spoil",
    [
        truncate,
        flip_a_bit,
        empty,
        replace_by_text,
        replace_by_snapshot,
        replace_by_directory,
        replace_by_another_size,
    ],
)
def test_spoiled_file_is_skipped_on_all_ranks(spoil: Any, shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    checkpointer = create_multi_node_checkpointer("x", comm, path=shared_tmp_path)
    for iteration in (1, 2, 3):
        checkpointer.save(counter(iteration), iteration)
    victim = comm.size - 1
    with in_turn(comm):
        if comm.rank == victim:
            spoil(shared_tmp_path / f"x.{victim}.3")
    resumed = counter()
    message = rf"skipping checkpoint .*x\.{victim}\.3"
    with pytest.warns(UserWarning, match=message) if comm.rank == victim else nullcontext():
        checkpointer.maybe_load(resumed)
    assert (resumed.x.array == 2).all()


@pytest.mark.mpi(3)
def test_checkpoint_that_only_some_ranks_have_is_ignored(comm: Any, shared_tmp_path: Path) -> None:
    checkpointer = create_multi_node_checkpointer("x", comm, path=shared_tmp_path)
    for iteration in (1, 2):
        checkpointer.save(counter(iteration), iteration)
    with in_turn(comm):
        if comm.rank == 1:
            (shared_tmp_path / "x.1.2").unlink()
            (shared_tmp_path / ".x.1.2.tmp").write_bytes(b"half")
    resumed = counter()
    checkpointer.maybe_load(resumed)
    assert (resumed.x.array == 1).all()
    comm.allgather_obj(None)
    assert not (shared_tmp_path / ".x.1.2.tmp").exists()


@pytest.mark.mpi(1, 2)
def test_no_checkpoint(comm: Any, shared_tmp_path: Path) -> None:
    resumed = counter(4)
    checkpointer = create_multi_node_checkpointer("x", comm)
    checkpointer.maybe_load(resumed, path=shared_tmp_path / "absent")
    assert (resumed.x.array == 4).all()


@pytest.mark.mpi(1, 3)
def test_checkpoint_of_another_model(comm: Any, shared_tmp_path: Path) -> None:
    checkpointer = create_multi_node_checkpointer("x", comm, path=shared_tmp_path)
    checkpointer.save(counter(1), 1)
    checkpointer.save(counter(2) if comm.rank else chainer.Link(), 2)
    resumed = counter()
    with pytest.warns(UserWarning, match="KeyError") if comm.rank == 0 else nullcontext():
        checkpointer.maybe_load(resumed)
    assert (resumed.x.array == 1).all()
    stranger = chainer.Chain(child=counter())
    with (
        pytest.warns(UserWarning, match="does not fit"),
        pytest.raises(RuntimeError, match="iteration 1 did not fit, nor did any older one"),
    ):
        checkpointer.maybe_load(stranger)


@pytest.mark.mpi(1, 3)
def test_write_failure_raises_on_all_and_keeps_the_previous(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    checkpointer = create_multi_node_checkpointer("x", comm, path=shared_tmp_path)
    checkpointer.save(counter(1), 1)

    class Unserializable:
        def serialize(self, serializer: Any) -> None:
            raise OSError("disk full")

    bad = Unserializable() if comm.rank == 0 else counter(2)
    with pytest.raises(OSError if comm.rank == 0 else RuntimeError, match="disk full"):
        checkpointer.save(bad, 2)
    resumed = counter()
    checkpointer.maybe_load(resumed)
    assert (resumed.x.array == 1).all()


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a/b",), "must be that of a file"),
        (("",), "must be that of a file"),
        (("x", 0), "at least 1"),
        (("x", 1, -1), "at least 0"),
    ],
)
def test_bad_arguments(comm: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_multi_node_checkpointer(arguments[0], comm, *arguments[1:])
    with pytest.raises(ValueError, match="no output folder"):
        create_multi_node_checkpointer("x", comm, path="").maybe_load(counter(), path="")


@pytest.mark.mpi(3)
def test_names_that_differ(comm: Any) -> None:
    with pytest.raises(ValueError, match="rank 0: name='x0'; rank 1: name='x1'"):
        create_multi_node_checkpointer(f"x{comm.rank}", comm)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_resumed_training_equals_an_unbroken_one(
    comm: Any, with_optimizer: bool, shared_tmp_path: Path
) -> None:
    unbroken = training.make_trainer(comm, shared_tmp_path / "a", 9)
    unbroken.run()
    out = shared_tmp_path / "b"
    broken = training.make_trainer(comm, out, 9)
    broken.extend(create_multi_node_checkpointer("job", comm), trigger=(2, "iteration"))

    def interrupt(trainer: Any) -> None:
        if trainer.updater.iteration == 7:
            raise KeyboardInterrupt

    broken.extend(interrupt, priority=-200, trigger=(1, "iteration"))
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    comm.allgather_obj(None)
    assert len(files(out)) == 3 * comm.size
    resumed = training.make_trainer(comm, out, 9, seed=50)
    checkpointer = create_multi_node_checkpointer("job", comm)
    resumed.extend(checkpointer, trigger=(2, "iteration"))
    resumed.extend(lambda trainer: None, name="interrupt", trigger=(1, "iteration"))
    optimizer = training.optimizer_of(resumed)
    checkpointer.maybe_load(resumed, optimizer if with_optimizer else None)
    assert resumed.updater.iteration == 6
    resumed.run()
    training.assert_same_state(training.state_of(resumed), training.state_of(unbroken))
    comm.allgather_obj(None)
    assert files(out) == []


def test_job_killed_while_it_writes(tmp_path: Path) -> None:
    """Whenever the ranks die, the newest complete checkpoint is loaded."""
    script = HERE / "write_checkpoints.py"
    job = Job(2, [script, tmp_path])
    try:
        while not any(int(file.suffix[1:]) >= 5 for file in tmp_path.glob("job.0.*")):
            assert job.process.poll() is None, job.output()
            time.sleep(0.02)
        for rank in [p for p in job.processes() if str(tmp_path) in p.cmdline()[2:3]]:
            with suppress(psutil.NoSuchProcess):  # it ended along with the other
                rank.kill()
    finally:
        job.kill()
    complete = {int(f.suffix[1:]) for f in tmp_path.glob("job.0.*")} & {
        int(f.suffix[1:]) for f in tmp_path.glob("job.1.*")
    }
    resumed = run_job(2, [script, tmp_path, "resume"])
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.split() == [str(max(complete))]
