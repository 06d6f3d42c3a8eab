"""Batches copied to a GPU in advance are the same, can be kept, and are saved as taken."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.backends.cuda import GpuDevice

import chainermn
from chainermn.datasets import DistributedOrderSampler
from chainermn.extensions.exactness import not_restored
from chainermn.iterators import prefetch_to_device

STATE = ("epoch", "is_new_epoch", "current_position", "epoch_detail", "previous_epoch_detail")


class StandInDevice(GpuDevice):
    """Sends arrays by the current stream, from pinned memory."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu

    def create_context(self) -> Any:
        return contextlib.nullcontext()

    def send(self, array: Any) -> Any:
        host = self.gpu.pinned(array.nbytes).view(array.dtype).reshape(array.shape)
        host[...] = array
        found = self.gpu.empty(array.size, array.dtype).reshape(array.shape)
        self.gpu.copy_to_gpu(host, found)
        return found


@pytest.fixture
def device(stand_in: Any) -> StandInDevice:
    return StandInDevice(stand_in)


@chainer.dataset.converter()
def convert(batch: Any, device: Any) -> Any:
    return tuple(map(device.send, chainer.dataset.concat_examples(batch)))


def examples(n: int = 10) -> list[tuple[np.ndarray, np.int32]]:
    return [(np.full(3, i, np.float32), np.int32(i)) for i in range(n)]


def serial(data: Any = None, n: int = 10, **options: Any) -> Any:
    order = DistributedOrderSampler(n, 0, n, seed=3)
    data = examples(n) if data is None else data
    return chainer.iterators.SerialIterator(data, 4, order_sampler=order, **options)


def state(iterator: Any) -> dict[str, Any]:
    return {name: getattr(iterator, name) for name in STATE}


def numbers(batch: Any) -> list[int]:
    return np.array(batch[1]).tolist()


def test_batches_and_positions_are_the_same(device: Any) -> None:
    plain = serial()
    with prefetch_to_device(serial(), convert, device)[0] as iterator:
        assert (iterator.batch_size, iterator.repeat) == (4, True)
        assert state(iterator) == state(plain)
        kept = []
        for _ in range(8):
            expected = chainer.dataset.concat_examples(next(plain))
            x, t = iterator.next()
            assert state(iterator) == state(plain)
            kept.append((x, expected[0]))
            np.testing.assert_array_equal(np.array(t), expected[1])
        for x, values in kept:
            np.testing.assert_array_equal(np.array(x), values)


def test_updater(device: Any) -> None:
    seen: list[tuple[list[float], list[int]]] = []

    class Model(chainer.Link):
        def forward(self, x: Any, t: Any) -> chainer.Variable:
            seen.append((np.array(x)[:, 0].tolist(), np.array(t).tolist()))
            return chainer.Variable(np.zeros((), np.float32))

    optimizer = chainer.optimizers.SGD().setup(Model())
    iterator, converter = prefetch_to_device(serial(), convert, device)
    updater = chainer.training.StandardUpdater(iterator, optimizer, converter)
    for _ in range(3):
        updater.update()
    updater.finalize()
    assert optimizer.epoch == updater.epoch == 1
    order = DistributedOrderSampler(10, 0, 10, seed=3)
    first, second = order.order(0).tolist(), order.order(1).tolist()
    used = [first[:4], first[4:8], [*first[8:], *second[:2]]]
    assert seen == [([float(i) for i in each], each) for each in used]


def test_streams_wait_for_each_other(device: Any) -> None:
    """No memory of a batch is reused while the script's stream may read it, and no host waits.

    The script uses each batch once more after it has got the next one.
    """
    iterator, _ = prefetch_to_device(serial(), convert, device)
    total = device.gpu.to_gpu(np.zeros(3, np.float32))
    before, _ = next(iterator)
    for _ in range(20):
        x, _ = next(iterator)
        total += before[0]
        before = x
    iterator.finalize()
    order = DistributedOrderSampler(10, 0, 10, seed=3)
    used = np.concatenate([order.order(epoch) for epoch in range(8)])[:80:4]
    assert np.array(total).tolist() == [used.sum()] * 3
    assert device.gpu.waits == 0


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "Pool", context.Pool)


def with_workers() -> Any:
    np.random.seed(5)
    iterator = chainermn.iterators.MultiprocessIterator
    return iterator(examples(), 4, n_processes=1, n_prefetch=2, shared_mem=16)


@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("make", [serial, with_workers])
def test_snapshot_of_what_has_been_taken_not_read(device: Any, make: Any) -> None:
    iterator, _ = prefetch_to_device(make(), convert, device)
    for _ in range(2):
        next(iterator)
    before = state(iterator)
    saved = chainer.serializers.npz.serialize(iterator)
    following = [numbers(next(iterator)) for _ in range(4)]
    iterator.finalize()
    with prefetch_to_device(make(), convert, device)[0] as resumed:
        next(resumed)
        chainer.serializers.NpzDeserializer(saved).load(resumed)
        assert state(resumed) == before
        assert [numbers(next(resumed)) for _ in range(4)] == following
    plain = make()
    chainer.serializers.NpzDeserializer(saved).load(plain)
    assert [[int(t) for _, t in next(plain)] for _ in range(4)] == following
    plain.finalize()


def test_end_and_reset(device: Any) -> None:
    iterator, _ = prefetch_to_device(serial(repeat=False), convert, device)
    first = [numbers(batch) for batch in iterator]
    assert [len(each) for each in first] == [4, 4, 2]
    with pytest.raises(StopIteration):
        next(iterator)
    iterator.reset()
    assert iterator.epoch == 0
    second = [numbers(batch) for batch in iterator]
    assert sorted(i for batch in second for i in batch) == [*range(10)]
    assert second != first
    iterator.finalize()


def test_goes_on_after_finalize(device: Any) -> None:
    plain = serial()
    iterator, _ = prefetch_to_device(serial(), convert, device)
    for _ in range(3):
        expected = [int(t) for _, t in next(plain)]
        assert numbers(next(iterator)) == expected
        iterator.finalize()
        assert state(iterator) == state(plain)


class Damaged(list[Any]):
    def __getitem__(self, i: Any) -> Any:
        if i == 5:
            raise OSError("example 5 is damaged")
        return super().__getitem__(i)


def test_errors_come_with_their_batch(device: Any) -> None:
    data = Damaged(examples(12))
    plain = chainer.iterators.SerialIterator(data, 4, shuffle=False)
    iterator, _ = prefetch_to_device(plain, convert, device)
    assert numbers(next(iterator)) == [0, 1, 2, 3]
    with pytest.raises(OSError, match="example 5 is damaged"):
        next(iterator)
    assert iterator.current_position == 8
    assert numbers(next(iterator)) == [8, 9, 10, 11]
    iterator.finalize()


def test_error_of_the_converter(device: Any) -> None:
    def refuse(batch: Any, device: Any) -> Any:
        raise ValueError("these cannot be converted")

    iterator, _ = prefetch_to_device(serial(), chainer.dataset.converter()(refuse), device)
    with pytest.raises(ValueError, match="these cannot be converted"):
        next(iterator)
    iterator.finalize()


def test_batches_of_any_form(device: Any) -> None:
    @chainer.dataset.converter()
    def to_dict(batch: Any, device: Any) -> Any:
        x, t = convert(batch, device)
        return {"xs": [x, (t, None)], "n": len(batch)}

    iterator, _ = prefetch_to_device(serial(), to_dict, device)
    batch = next(iterator)
    x, (t, nothing) = batch["xs"]
    assert np.array(x)[:, 0].tolist() == np.array(t).tolist()
    assert (nothing, batch["n"]) == (None, 4)
    iterator.finalize()

    @chainer.dataset.converter()
    def to_variable(batch: Any, device: Any) -> Any:
        return chainer.Variable(np.zeros(1))

    iterator, _ = prefetch_to_device(serial(), to_variable, device)
    with pytest.raises(TypeError, match=r"a converter that returns arrays, .* got .*Variable"):
        next(iterator)
    iterator.finalize()


def test_threads_end(device: Any) -> None:
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if "prefetch" in each.name]

    finalized, _ = prefetch_to_device(serial(), convert, device)
    dropped, _ = prefetch_to_device(serial(), convert, device)
    next(finalized), next(dropped)
    started = threads()
    assert len(started) == 2
    finalized.finalize()
    del dropped
    for thread in started:
        thread.join(60)
    assert not threads()


def test_a_cpu_changes_nothing() -> None:
    iterator = chainer.iterators.SerialIterator(examples(), 4)
    for device in (None, chainer.get_device("@numpy")):
        assert prefetch_to_device(iterator, convert, device) == (iterator, convert)


def test_what_cannot_be_repeated_is_refused(device: Any) -> None:
    shuffled = chainer.iterators.SerialIterator(examples(), 4)
    with pytest.raises(ValueError, match="does not depend on NumPy's global generator"):
        prefetch_to_device(shuffled, convert, device)
    comm = chainermn.create_communicator("naive")
    from_one_rank = chainermn.create_multi_node_iterator(serial(), comm)
    with pytest.raises(TypeError, match="got a MultiNodeIterator"):
        prefetch_to_device(from_one_rank, convert, device)


class Noisy:
    def __init__(self) -> None:
        self.random = np.random.RandomState(1)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        return self.random.uniform(size=3), i


def test_what_a_resumed_run_will_not_repeat_is_told(device: Any, tmp_path: Any) -> None:
    iterator, converter = prefetch_to_device(serial(Noisy()), convert, device)
    optimizer = chainer.optimizers.SGD().setup(chainer.Link())
    updater = chainer.training.StandardUpdater(iterator, optimizer, converter)
    trainer = chainer.training.Trainer(updater, (1, "epoch"), out=tmp_path)
    found = not_restored(trainer)
    expected = "reads in advance, and the generator 'random' of its data set with it"
    assert any(expected in each for each in found), found
    iterator.finalize()


@pytest.mark.mpi(2)
def test_ranks_divide_an_epoch(device: Any) -> None:
    comm = chainermn.create_communicator("naive")
    data = examples(16)
    order = chainermn.datasets.create_distributed_sampler(data, comm, seed=1)
    plain = chainer.iterators.SerialIterator(data, 4, order_sampler=order)
    iterator, _ = prefetch_to_device(plain, convert, device)
    used = [*numbers(next(iterator)), *numbers(next(iterator))]
    iterator.finalize()
    assert sorted(np.concatenate(comm.allgather_obj(used))) == [*range(16)]
