"""One rank's batches, which all ranks get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.datasets import TupleDataset
from chainer.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
from hypothesis import given, settings
from hypothesis import strategies as st

import chainermn
from chainermn.iterators import create_multi_node_iterator

PROPERTY = settings(max_examples=10)
NAMES = ["epoch", "is_new_epoch", "current_position", "epoch_detail", "previous_epoch_detail"]


def position(iterator: Any) -> list[Any]:
    return [getattr(iterator, name) for name in NAMES]


def dataset(dtype: str = "f4", n: int = 7) -> TupleDataset:
    return TupleDataset(np.arange(2 * n).reshape(n, 2).astype(dtype), np.arange(n))


@pytest.mark.mpi(1, 3)
@PROPERTY
@given(
    master=st.integers(0, 3),
    batch=st.integers(1, 9),
    repeat=st.booleans(),
    dtype=st.sampled_from(["f2", "f4", "f8", "u1", "?"]),
)
def test_batches_and_positions(master: int, batch: int, repeat: bool, dtype: str) -> None:
    comm = chainermn.create_communicator("naive")
    master %= comm.size
    own = SerialIterator(dataset(dtype), batch, repeat, shuffle=False)
    alone = SerialIterator(dataset(dtype), batch, repeat, shuffle=False)
    shared = create_multi_node_iterator(own if comm.rank == master else None, comm, master)
    assert position(shared) == position(alone)
    assert (shared.batch_size, shared.repeat) == (batch, repeat)
    for _ in range(9):
        expected, got = next(alone, None), next(shared, None)
        assert position(shared) == position(alone)
        if expected is None:
            assert got is None
            continue
        for (x, t), (expected_x, expected_t) in zip(got, expected, strict=True):
            np.testing.assert_array_equal(x, expected_x)
            assert (x.dtype, t.dtype) == (expected_x.dtype, expected_t.dtype)
            assert t == expected_t
    shared.reset()
    alone.reset()
    assert position(shared) == position(alone)
    np.testing.assert_equal(shared.next(), alone.next())


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(
    "examples", [["a", {"b": 1}, None], [(1, "x", np.ones(2))], [np.ones(i) for i in range(4)]]
)
def test_any_examples(comm: Any, examples: list[Any]) -> None:
    own = MultithreadIterator(examples, 2, repeat=False, shuffle=False)
    with create_multi_node_iterator(own if comm.rank == 0 else None, comm) as shared:
        seen = [example for batch in shared for example in batch]
    np.testing.assert_equal(seen, examples)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_snapshot_of_the_master_serves_all_ranks(steps: int, shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")

    def iterator() -> Any:
        np.random.seed(5)
        own = SerialIterator(dataset(), 3)
        return create_multi_node_iterator(own if comm.rank == 0 else None, comm)

    unbroken = iterator()
    for _ in range(steps):
        next(unbroken)
    for per_rank in (False, True):
        path = shared_tmp_path / f"{per_rank}.{comm.rank if per_rank else 0}"
        if per_rank or comm.rank == 0:
            chainer.serializers.save_npz(str(path), unbroken)
        comm.allgather_obj(None)
        resumed = iterator()
        chainer.serializers.load_npz(str(path), resumed)
        assert position(resumed) == position(unbroken)
    np.testing.assert_equal(next(resumed), next(unbroken))


KINDS = {
    "serial": lambda examples: SerialIterator(examples, 3),
    "in order": lambda examples: SerialIterator(examples, 3, shuffle=False),
    "threads": lambda examples: MultithreadIterator(examples, 3),
    "processes": lambda examples: MultiprocessIterator(examples, 3, n_processes=1),
}


@pytest.mark.mpi(3)
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
@pytest.mark.parametrize("kind", ["serial", "in order", "threads"])
def test_snapshot_of_any_rank_loads_into_a_plain_iterator(kind: str, steps: int) -> None:
    comm = chainermn.create_communicator("naive")
    np.random.seed(5)
    own = KINDS[kind](dataset()) if comm.rank == 1 else None
    shared = create_multi_node_iterator(own, comm, 1)
    for _ in range(steps):
        next(shared)
    assert_goes_on(KINDS[kind](dataset()), shared)


class Seeded(SerialIterator):
    """An iterator that saves more than a position: it gets a seed with the first batch."""

    seed = 0

    def __next__(self) -> Any:
        self.seed = self.seed or 5
        return super().__next__()

    next = __next__

    def serialize(self, serializer: Any) -> None:
        super().serialize(serializer)
        self.seed = serializer("seed", self.seed)


@pytest.mark.mpi(3)
def test_all_ranks_save_everything_that_the_master_saves(comm: Any) -> None:
    shared = create_multi_node_iterator(Seeded(dataset(), 3) if comm.rank == 1 else None, comm, 1)
    for _ in range(6):
        saved = chainer.serializers.npz.serialize(shared)
        next(shared)
        expected = comm.bcast_obj(saved, root=1)
        assert saved["seed"] == (5 if shared.epoch_detail > 0.5 else 0)
        np.testing.assert_equal(saved, expected)
        chainer.serializers.NpzDeserializer(saved).load(shared)
        next(shared)


@pytest.mark.mpi(2)
def test_snapshot_of_any_rank_loads_into_one_with_processes(comm: Any) -> None:
    # Worker processes may not start while MPI runs, so this iterator only loads.
    own = KINDS["serial"](dataset()) if comm.rank == 0 else None
    shared = create_multi_node_iterator(own, comm)
    for _ in range(4):
        next(shared)
    saved = chainer.serializers.npz.serialize(shared)
    plain: Any = KINDS["processes"](dataset())
    chainer.serializers.NpzDeserializer(saved).load(plain)
    assert position(plain) == position(shared)
    orders = comm.allgather_obj(chainer.serializers.npz.serialize(plain)["order"])
    np.testing.assert_array_equal(orders[0], orders[1])
    plain.finalize()


@pytest.mark.mpi(3)
@pytest.mark.parametrize("has_order", [True, False])
def test_snapshot_of_a_rank_that_has_loaded_one(comm: Any, has_order: bool) -> None:
    def iterator(seed: int) -> Any:
        np.random.seed(seed)
        return create_multi_node_iterator(SerialIterator(dataset(n=20), 3), comm)

    before, resumed = iterator(1), iterator(2)
    next(before)
    saved = chainer.serializers.npz.serialize(before)
    if not has_order and comm.rank != 0:
        del saved["order"]  # as an older version wrote it
    chainer.serializers.NpzDeserializer(saved).load(resumed)
    if not has_order:
        next(resumed)
    assert_goes_on(SerialIterator(dataset(n=20), 3), resumed)


def assert_goes_on(plain: Any, shared: Any) -> None:
    """Load this rank's snapshot of ``shared`` into ``plain``; their next batches must match."""
    saved = chainer.serializers.npz.serialize(shared)
    chainer.serializers.NpzDeserializer(saved).load(plain)
    assert position(plain) == position(shared)
    np.testing.assert_equal(next(plain), next(shared))


@pytest.mark.mpi(1, 3)
def test_in_a_trainer(comm: Any, tmp_path: Path) -> None:
    own = SerialIterator(np.arange(6, dtype="f").reshape(6, 1), 2, shuffle=False)
    shared = create_multi_node_iterator(own if comm.rank == 0 else None, comm)
    model = chainer.Sequential(chainer.links.Linear(1, 1), chainer.functions.sum)
    updater = chainer.training.StandardUpdater(shared, chainer.optimizers.SGD(0).setup(model))
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out=str(tmp_path))
    fired = []
    trainer.extend(lambda trainer: fired.append(trainer.updater.iteration), trigger=(1, "epoch"))
    trainer.run()
    assert fired == [3, 6]


@pytest.mark.mpi(3)
def test_other_ranks_have_no_other_attributes(comm: Any) -> None:
    own = SerialIterator(dataset(), 3)
    shared = create_multi_node_iterator(own if comm.rank == 0 else None, comm)
    if comm.rank == 0:
        assert shared.dataset is own.dataset
    else:
        with pytest.raises(AttributeError, match="only the batches"):
            _ = shared.dataset


class Broken(Iterator[Any]):
    def __next__(self) -> Any:
        raise OSError("disk gone")


@pytest.mark.mpi(1, 3)
def test_failure_of_the_master_raises_on_all(comm: Any) -> None:
    shared = create_multi_node_iterator(Broken(), comm)
    message = "disk gone" if comm.rank == 0 else "rank 0: OSError: disk gone"
    with pytest.raises(OSError if comm.rank == 0 else RuntimeError, match=message):
        next(shared)


@pytest.mark.mpi(1, 3)
def test_batch_that_cannot_be_pickled(comm: Any) -> None:
    own = SerialIterator([lambda: 1], 1)
    shared = create_multi_node_iterator(own, comm)
    if comm.size > 1:
        with pytest.raises(TypeError, match="pickle"):
            next(shared)


@pytest.mark.mpi(1, 3)
def test_bad_arguments(comm: Any) -> None:
    good = SerialIterator(dataset(), 3)
    with pytest.raises(TypeError, match="expected an iterator"):
        create_multi_node_iterator(None if comm.rank == 0 else good, comm)
    with pytest.raises(ValueError, match="must be a rank"):
        create_multi_node_iterator(good, comm, 3)
