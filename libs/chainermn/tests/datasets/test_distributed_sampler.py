"""The order of each epoch on each rank, and Chainer's iterators that follow it."""

from __future__ import annotations

import pickle
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
from hypothesis import given, settings
from hypothesis import strategies as st

import chainermn
from chainermn.datasets import create_distributed_sampler

PROPERTY = settings(max_examples=15)


@pytest.mark.mpi(1, 3)
@PROPERTY
@given(n=st.integers(1, 20), seed=st.integers(0, 2**32 - 1), equal=st.booleans())
def test_an_epoch_visits_every_example(comm: Any, n: int, seed: int, equal: bool) -> None:
    sampler = create_distributed_sampler(n, comm, seed=seed, force_equal_length=equal)
    for epoch in range(3):
        parts = comm.allgather_obj(sampler.order(epoch))
        visited = np.concatenate(parts)
        assert set(visited) == set(range(n))
        if equal:
            assert {len(part) for part in parts} == {-(-n // comm.size)}
        else:
            assert len(visited) == n


@pytest.mark.mpi(1, 3)
def test_orders_are_one_permutation_divided(comm: Any) -> None:
    sampler = create_distributed_sampler(range(12), comm, seed=comm.rank + 7)
    for epoch in range(4):
        whole = np.random.RandomState([7, epoch]).permutation(12)
        begin = 12 * comm.rank // comm.size
        np.testing.assert_array_equal(sampler.order(epoch), whole[begin : begin + 12 // comm.size])


@pytest.mark.mpi(1, 3)
def test_seed_is_drawn_from_the_generator_of_rank_0(comm: Any) -> None:
    np.random.seed(comm.rank)
    sampler = create_distributed_sampler(100, comm)
    assert sampler.seed == np.random.RandomState(0).randint(2**31)


@pytest.mark.mpi(1, 3)
def test_without_shuffling(comm: Any) -> None:
    sampler = create_distributed_sampler(6, comm, shuffle=False)
    begin, end = chainermn.scatter_index(6, comm)
    iterator = SerialIterator(range(6), 1, order_sampler=sampler)
    assert [next(iterator)[0] for _ in range(2 * (end - begin))] == [*range(begin, end)] * 2


@pytest.mark.mpi(3)
def test_fewer_examples_than_ranks(comm: Any) -> None:
    sampler = create_distributed_sampler(2, comm, force_equal_length=False)
    with pytest.raises(ValueError, match=r"^rank 2 has no example: 2 examples, 3 ranks; pass"):
        SerialIterator(range(2), 1, order_sampler=sampler)


def serial(dataset: Any, sampler: Any) -> SerialIterator:
    return SerialIterator(dataset, 2, order_sampler=sampler)


def threads(dataset: Any, sampler: Any) -> MultithreadIterator:
    return MultithreadIterator(dataset, 2, n_threads=2, order_sampler=sampler)


def processes(dataset: Any, sampler: Any) -> MultiprocessIterator:
    return MultiprocessIterator(dataset, 2, n_processes=1, order_sampler=sampler)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("make", [serial, threads, processes])
def test_iterators(comm: Any, make: Any) -> None:
    sampler = create_distributed_sampler(8, comm, seed=1)
    iterator = make(list(range(8)), sampler)
    n = 8 // comm.size
    seen = [example for _ in range(3 * n // 2) for example in next(iterator)]
    iterator.finalize()
    for epoch in range(3):
        assert seen[epoch * n : (epoch + 1) * n] == list(sampler.order(epoch))
    assert iterator.epoch == 3


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("stop", [3, 4, 7])
def test_resumed_iterator_goes_on_with_the_next_epoch(comm: Any, stop: int) -> None:
    def iterator() -> SerialIterator:
        sampler = create_distributed_sampler(8, comm, seed=3)
        return SerialIterator(list(range(8)), 2, order_sampler=sampler)

    unbroken = iterator()
    batches = [next(unbroken) for _ in range(16)]
    first = iterator()
    assert [next(first) for _ in range(stop)] == batches[:stop]
    saved = chainer.serializers.DictionarySerializer()
    first.serialize(saved)
    second = iterator()
    second.serialize(chainer.serializers.NpzDeserializer(saved.target))
    assert [next(second) for _ in range(stop, 16)] == batches[stop:]


def test_order_of_another_seed_is_not_silently_taken(comm: Any) -> None:
    sampler = create_distributed_sampler(8, comm, seed=0)
    sampler(np.arange(8), 0)
    foreign = create_distributed_sampler(8, comm, seed=1).order(2)
    with pytest.warns(UserWarning, match="another seed, number of ranks"):
        order = sampler(foreign, 0)
    np.testing.assert_array_equal(order, sampler.order(1))


def test_set_epoch_and_reset(comm: Any) -> None:
    sampler = create_distributed_sampler(8, comm, seed=0)
    iterator = SerialIterator(range(8), 8, repeat=False, order_sampler=sampler)
    for epoch in (5, 2):
        sampler.set_epoch(epoch)
        iterator.reset()
        np.testing.assert_array_equal(next(iterator), sampler.order(epoch))


def test_sampler_can_be_pickled(comm: Any) -> None:
    sampler = create_distributed_sampler(8, comm, seed=0)
    copy = pickle.loads(pickle.dumps(sampler))
    np.testing.assert_array_equal(copy.order(4), sampler.order(4))


def test_iterator_over_another_data_set() -> None:
    sampler = create_distributed_sampler(8, chainermn.create_communicator("naive"))
    with pytest.raises(ValueError, match="a data set of 8 examples"):
        SerialIterator(range(9), 1, order_sampler=sampler)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("seed", [-1, 2**32, 2**33, 0.5])
def test_bad_seed_on_one_rank(comm: Any, seed: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        create_distributed_sampler(8, comm, seed=seed if comm.rank == 1 else 0)


@pytest.mark.mpi(3)
def test_lengths_that_differ(comm: Any) -> None:
    with pytest.raises(ValueError, match=r"use scatter_dataset.* 8 examples; rank 1:"):
        create_distributed_sampler(8 + comm.rank, comm)
