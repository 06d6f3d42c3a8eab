"""Orders, snapshots and copies of iterators, while the training draws random numbers."""

import copy
import io
import multiprocessing

import chainer
import numpy as np
import pytest
from chainer.datasets import SubDataset, TransformDataset, TupleDataset
from chainer.iterators import (
    MultiprocessIterator,
    MultithreadIterator,
    SerialIterator,
    ShuffleOrderSampler,
)

N_BATCHES = 8
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


def serial(n, **options):
    return SerialIterator(list(range(n)), 4, **options)


def threads(n, **options):
    return MultithreadIterator(list(range(n)), 4, **options)


def processes(n, **options):
    return MultiprocessIterator(list(range(n)), 4, n_processes=1, shared_mem=0, **options)


def processes_far_ahead(n):
    return processes(n, n_prefetch=3)


def take(iterator, n_batches, after_each=lambda: None):
    """Return batches, and a number drawn after each, as a training that uses dropout draws."""
    taken = []
    for _ in range(n_batches):
        taken.append((list(next(iterator)), np.random.rand(), iterator.epoch_detail))
        after_each()
    return taken


def save(iterator):
    file = io.BytesIO()
    chainer.serializers.save_npz(file, iterator)
    with np.load(io.BytesIO(file.getvalue()), allow_pickle=False) as arrays:
        return dict(arrays), np.random.get_state()


def load(iterator, snapshot):
    state, generator = snapshot
    chainer.serializers.NpzDeserializer(state).load(iterator)
    np.random.set_state(generator)


@pytest.mark.parametrize("n", [10, 3])  # in 3 examples, a batch ends more than one epoch
@pytest.mark.parametrize("make", [serial, threads, processes, processes_far_ahead])
def test_snapshots_change_nothing_and_resume_exactly(make, n):
    np.random.seed(7)
    with make(n) as iterator:
        expected = take(iterator, N_BATCHES)
    np.random.seed(7)
    with make(n) as iterator:
        snapshots = [save(iterator)]
        assert take(iterator, N_BATCHES, lambda: snapshots.append(save(iterator))) == expected
        for i, snapshot in enumerate(snapshots):
            load(iterator, snapshot)
            assert take(iterator, N_BATCHES - i) == expected[i:]
    np.random.seed(8)
    with make(n) as fresh:
        load(fresh, snapshots[2])
        load(fresh, save(fresh))
        assert take(fresh, N_BATCHES - 2) == expected[2:]


@pytest.mark.parametrize(
    "start", [pytest.param(name, marks=pytest.mark.nightly) for name in ("forkserver", "spawn")]
)
def test_snapshots_with_any_start_method(start, monkeypatch):
    monkeypatch.setattr(multiprocessing, "Pool", multiprocessing.get_context(start).Pool)
    for make in (processes, processes_far_ahead):
        test_snapshots_change_nothing_and_resume_exactly(make, 10)


def test_a_generator_of_its_own_starts_where_the_first_order_ends():
    np.random.seed(7)
    generator = np.random.RandomState(7)
    with processes(8) as iterator:
        for n_batches in (5, 3):
            orders = [generator.permutation(8)]
            own = copy.deepcopy(generator)
            orders += [own.permutation(8) for _ in range(2)]
            taken = take(iterator, n_batches)
            read = [example for batch, _, _ in taken for example in batch]
            assert read == np.concatenate(orders)[: len(read)].tolist()
            assert [number for _, number, _ in taken] == generator.rand(n_batches).tolist()
            iterator.reset()


def test_evaluations_that_shuffle_resume_exactly():
    def evaluate(iterator):
        iterator.reset()
        return list(iterator), np.random.rand()

    np.random.seed(7)
    with processes(8, repeat=False) as iterator, processes(8, repeat=False) as fresh:
        evaluate(iterator)
        state = np.random.get_state()
        expected = evaluate(iterator)
        np.random.set_state(state)
        assert evaluate(fresh) == expected


def test_two_iterators_have_their_own_orders_and_resume_before_the_first_batch():
    np.random.seed(7)
    with processes(8) as one, processes(8) as other:
        snapshots = [save(one), save(other)]
        orders = [[next(iterator) for _ in range(6)] for iterator in (one, other)]
    assert all(a != b for a, b in zip(*orders, strict=True))
    np.random.seed(8)
    with processes(8) as one, processes(8) as other:
        load(one, snapshots[0])
        load(other, snapshots[1])
        assert [[next(iterator) for _ in range(6)] for iterator in (one, other)] == orders


class OwnSampler(ShuffleOrderSampler):
    pass


@pytest.mark.parametrize(
    ("sampler", "generator"),
    [
        (OwnSampler, np.random.RandomState),
        (ShuffleOrderSampler, lambda seed: np.random.RandomState(np.random.PCG64(seed))),
        (ShuffleOrderSampler, np.random.default_rng),
    ],
)
def test_generator_of_the_users_own(sampler, generator):
    before = np.random.get_state()[1:3]
    with (
        processes(8, order_sampler=sampler(generator(7))) as iterator,
        processes(8, order_sampler=sampler(generator(8))) as fresh,
    ):
        next(iterator)
        saved = chainer.serializers.npz.serialize(iterator)
        taken = [next(iterator) for _ in range(7)]
        chainer.serializers.NpzDeserializer(saved).load(fresh)
        assert [next(fresh) for _ in range(7)] == taken
    drawing = generator(7)
    expected = np.concatenate([drawing.permutation(8) for _ in range(4)])[4:]
    assert np.concatenate(taken).tolist() == expected.tolist()
    np.testing.assert_equal(np.random.get_state()[1:3], before)


@pytest.mark.parametrize("make", [threads, processes])
def test_without_shuffling_nothing_is_drawn_or_saved(make):
    before = np.random.get_state()[1:3]
    with make(10, shuffle=False) as iterator, make(10, shuffle=False) as fresh:
        next(iterator)
        saved = chainer.serializers.npz.serialize(iterator)
        chainer.serializers.NpzDeserializer(saved).load(fresh)
        assert next(iterator) == next(fresh) == [4, 5, 6, 7]
    assert "generator" not in saved
    np.testing.assert_equal(np.random.get_state()[1:3], before)


@pytest.mark.parametrize("make", [threads, processes])
def test_snapshot_without_a_generator_still_loads(make):
    with make(8) as iterator, make(8) as fresh:
        next(iterator)
        saved = chainer.serializers.npz.serialize(iterator)
        del saved["generator"]
        chainer.serializers.NpzDeserializer(saved).load(fresh)
        assert next(fresh) == next(iterator)
        assert sorted(next(fresh) + next(fresh)) == list(range(8))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("n_batches", [0, 3])
def test_copies_go_on_alike_and_draw_nothing(duplicate, n_batches):
    np.random.seed(7)
    with processes(10) as iterator:
        before = take(iterator, n_batches)
        state = np.random.get_state()[1:3]
        with duplicate(iterator) as other:
            np.testing.assert_equal(np.random.get_state()[1:3], state)
            assert (other.epoch, other.current_position) == (
                n_batches * 4 // 10,
                n_batches * 4 % 10,
            )
            assert [next(iterator) for _ in range(6)] == [next(other) for _ in range(6)]
    assert len(before) == n_batches


def test_reason_not_to_repeat():
    part = SubDataset([1], 0, 1)
    part.why_not_repeated = "rank 1 has none"
    transformed = TransformDataset(part, str)
    for data in (part, transformed, SubDataset(transformed, 0, 1), TupleDataset([1], part)):
        with pytest.raises(ValueError, match="rank 1 has none"):
            SerialIterator(data, 1)
    assert list(SerialIterator(part, 1, repeat=False)) == [[1]]
