"""The same order on all ranks."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest
from chainer.iterators import (
    MultiprocessIterator,
    MultithreadIterator,
    SerialIterator,
    ShuffleOrderSampler,
)

from chainermn.iterators import create_synchronized_iterator

MAKERS = {
    "serial": SerialIterator,
    "threads": lambda *args, **kwargs: MultithreadIterator(*args, n_threads=1, **kwargs),
    "processes": lambda *args, **kwargs: MultiprocessIterator(*args, n_processes=1, **kwargs),
}


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("maker", MAKERS)
def test_same_order_on_all_ranks(comm: Any, maker: str) -> None:
    np.random.seed(comm.rank)
    shared = create_synchronized_iterator(MAKERS[maker](list(range(10)), 5), comm)
    epochs = [[*next(shared), *next(shared)] for _ in range(4)]
    shared.finalize()
    assert comm.allgather_obj(epochs) == [epochs] * comm.size
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert shared.epoch == 4


@pytest.mark.mpi(1, 3)
def test_order_depends_on_the_generator_of_rank_0(comm: Any) -> None:
    orders = []
    for seed in (0, 0, 1):
        np.random.seed(seed if comm.rank == 0 else comm.rank + 7)
        orders.append(
            next(create_synchronized_iterator(SerialIterator(list(range(20)), 20), comm))
        )
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.mpi(1, 3)
def test_without_shuffling_the_order_stays(comm: Any) -> None:
    shared = create_synchronized_iterator(SerialIterator(list(range(4)), 2, shuffle=False), comm)
    assert [next(shared) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


class Reversing:
    """An order sampler that draws from a given generator."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, order: np.ndarray, position: int) -> np.ndarray:
        return self.generator.permutation(order)[::-1]


@pytest.mark.mpi(1, 3)
def test_users_order_sampler_is_that_of_rank_0(comm: Any) -> None:
    generator = np.random.RandomState(comm.rank)
    shared = create_synchronized_iterator(
        SerialIterator(list(range(8)), 8, order_sampler=Reversing(generator)), comm
    )
    seen = []
    for _ in range(3):
        seen.append(next(shared))
        generator.random(comm.rank + 1)  # as other code does, differently on each rank
    assert comm.allgather_obj(seen) == [seen] * comm.size


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("stop", [1, 4, 5])
def test_resumed_iterator_continues_alike(comm: Any, maker: str, stop: int) -> None:
    def iterator() -> Any:
        return create_synchronized_iterator(MAKERS[maker](list(range(8)), 4), comm)

    unbroken, resumed = iterator(), iterator()
    for _ in range(stop):
        next(unbroken)
    saved = chainer.serializers.DictionarySerializer()
    unbroken.serialize(saved)
    resumed.serialize(chainer.serializers.NpzDeserializer(saved.target))
    for _ in range(8):
        assert list(next(resumed)) == list(next(unbroken))
    assert resumed.epoch == unbroken.epoch
    unbroken.finalize()
    resumed.finalize()


@pytest.mark.mpi(1, 3)
def test_snapshot_of_a_plain_iterator(comm: Any) -> None:
    plain = SerialIterator(list(range(8)), 4)
    next(plain)
    saved = chainer.serializers.DictionarySerializer()
    plain.serialize(saved)
    del saved.target["order"]
    order = comm.bcast(np.random.permutation(8))
    saved("order", order)
    shared = create_synchronized_iterator(SerialIterator(list(range(8)), 4), comm)
    shared.serialize(chainer.serializers.NpzDeserializer(saved.target))
    with pytest.warns(UserWarning, match="another seed"):
        assert next(shared) == list(order[4:])
    assert sorted(next(shared) + next(shared)) == list(range(8))


def test_attributes_are_those_of_the_iterator(comm: Any) -> None:
    actual = SerialIterator(list(range(8)), 4)
    shared = create_synchronized_iterator(actual, comm)
    shared.batch_size = 2
    assert len(next(shared)) == actual.batch_size == 2
    assert shared.epoch_detail == actual.epoch_detail == 0.25
    assert shared.actual_iterator is actual


@pytest.mark.mpi(3)
@pytest.mark.parametrize("bad", [iter([1]), None])
def test_no_iterator_of_chainers_on_one_rank(comm: Any, bad: Any) -> None:
    good = SerialIterator([1], 1)
    with pytest.raises(ValueError, match="must have 'dataset'"):
        create_synchronized_iterator(bad if comm.rank == 1 else good, comm)


@pytest.mark.mpi(3)
def test_lengths_that_differ(comm: Any) -> None:
    with pytest.raises(ValueError, match=r"the same\. rank 0: 3 examples; rank 1: 4 examples"):
        create_synchronized_iterator(SerialIterator([1] * (3 + comm.rank), 1), comm)


@pytest.mark.mpi(2)
def test_order_sampler_that_cannot_be_pickled(comm: Any) -> None:
    sampler = ShuffleOrderSampler()
    iterator = SerialIterator([1], 1, order_sampler=lambda *args: sampler(*args))
    with pytest.raises(TypeError, match="pickle"):
        create_synchronized_iterator(iterator, comm)
