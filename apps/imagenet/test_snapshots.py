"""Weights and snapshots are loaded as a whole or not at all."""

from pathlib import Path
from types import SimpleNamespace

import chainer
import numpy as np
import pytest

from chainermn.datasets import DistributedOrderSampler

Arrays = dict[str, np.ndarray]


@pytest.fixture
def saved(app, tmp_path) -> tuple[chainer.Link, Path, Arrays]:
    model, path = app.models.ARCHITECTURES["small"](n_out=7), tmp_path / "weights.npz"
    chainer.serializers.save_npz(path, model)
    with np.load(path) as arrays:
        return model, path, dict(arrays)


def test_weights_of_another_network_are_named(app, saved):
    model, path, arrays = saved
    del arrays["bn3/beta"], arrays["bn2/N"]
    arrays["fc/W"] = np.zeros((10, 128), np.float32)
    arrays |= {f"other{i}/W": np.zeros(1) for i in range(7)}
    np.savez(path, **arrays)
    before = {name: p.array.copy() for name, p in model.namedparams()}
    with pytest.raises(ValueError, match="does not have the weights of this network") as caught:
        app.snapshots.load_weights(path, model)
    assert str(caught.value).partition("network: ")[2] == (
        "it lacks bn2/N, bn3/beta; it also has other0/W, other1/W, other2/W, other3/W, other4/W "
        "and 2 more; of other shapes are fc/W (10, 128), not (7, 128)"
    )
    for name, parameter in model.namedparams():
        np.testing.assert_array_equal(parameter.array, before[name])


def test_error_for_a_file_that_is_damaged_or_absent(app, saved):
    model, path, _ = saved
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
    for damaged in (b"", b"weights", content[:middle], flipped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"weights\.npz is damaged, or not an NPZ file"):
            app.snapshots.load_weights(path, model)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match=r"weights\.npz is damaged, or not an NPZ file"):
        app.snapshots.load_weights(path, model)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"weights\.npz"):
        app.snapshots.load_weights(path, model)


N = 24  # examples of all ranks


class Numbers(chainer.dataset.DatasetMixin):
    """As many examples as in an epoch, each the number by which it is asked for."""

    def __len__(self) -> int:
        return N

    def get_example(self, i: int) -> np.ndarray:
        return np.array(i, np.int32)


def make_trainer(app, size: int, rank: int, stop: tuple[int, str]) -> SimpleNamespace:
    """Return a trainer of a rank, whose ``taken`` are the numbers of its examples."""
    part = slice(rank * N // size, (rank + 1) * N // size)
    sampler = DistributedOrderSampler(N, part.start, part.stop, seed=1)
    orders = app.data.EpochOrder(sampler)
    batches = chainer.iterators.SerialIterator(Numbers(), 2, order_sampler=orders)
    model = chainer.links.Bias(0, ())
    taken: list[int] = []

    def loss(numbers: np.ndarray) -> chainer.Variable:
        taken.extend(numbers.tolist())
        return model.b + 0

    optimizer = chainer.optimizers.SGD().setup(model)
    updater = chainer.training.StandardUpdater(batches, optimizer, loss_func=loss)
    trainer = chainer.training.Trainer(updater, stop)
    return SimpleNamespace(trainer=trainer, orders=orders, taken=taken)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("iterations", "left"), [(12, 1), (15, 0.5)])
def test_every_rank_goes_on_with_images_of_its_own(app, size, iterations, left, tmp_path):
    path = tmp_path / "snapshot.npz"
    first = make_trainer(app, 2, 0, (iterations, "iteration"))  # 6 iterations an epoch
    first.trainer.run()
    chainer.serializers.save_npz(path, first.trainer)

    later: list[list[int]] = []
    for rank in range(size):
        resumed = make_trainer(app, size, rank, (4, "epoch"))
        app.snapshots.load_snapshot(path, resumed.trainer, resumed.orders)
        assert resumed.trainer.updater.iteration == iterations
        resumed.trainer.run()
        later.append(resumed.taken)
    n_left = int(left * N) // size
    rest = {n for taken in later for n in taken[:n_left]}
    assert len(rest) == left * N
    assert rest <= set(range(2 * N, 3 * N))
    assert {n for taken in later for n in taken[n_left:]} == set(range(3 * N, 4 * N))


def test_snapshot_of_another_training_is_refused(app, tmp_path):
    path = tmp_path / "snapshot.npz"
    resumed = make_trainer(app, 2, 0, (1, "iteration"))
    chainer.serializers.save_npz(path, resumed.trainer.updater.get_optimizer("main").target)
    with pytest.raises(ValueError, match="is not a snapshot of such a training") as caught:
        app.snapshots.load_snapshot(path, resumed.trainer, resumed.orders)
    assert str(caught.value).startswith(f"{path} ")
