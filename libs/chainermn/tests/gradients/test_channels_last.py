"""Parameters whose channels lie side by side in memory give the same values as in Chainer's order.

They stay as they lie, and so do their gradients, on ranks that agree on the order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
import pytest

import chainermn
from chainermn.channels_last import is_channels_last
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.compression import PowerSGD, Quantization, TopK
from chainermn.optimizers import LocalSGD

SHAPES = {"a": (4, 3, 2, 2), "b": (2,), "c": (3, 4, 1, 1), "d": (2, 4, 2, 1)}
STEPS = 5

Lay = Callable[[np.ndarray], np.ndarray]


def as_chainer(array: np.ndarray) -> np.ndarray:
    return array


def channels_last(array: np.ndarray) -> np.ndarray:
    if array.ndim < 4:
        return array
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


class Filters(chainer.Chain):
    """Parameters whose gradients are the arrays that it is called with."""

    def __init__(self, lay: Lay = as_chainer, seed: int = 0) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        with self.init_scope():
            for name, shape in SHAPES.items():
                values = random.normal(size=shape).astype("f")
                setattr(self, name, chainer.Parameter(lay(values)))

    def forward(self, arrays: dict[str, np.ndarray]) -> chainer.Variable:
        return sum(F.sum(getattr(self, name) * array) for name, array in arrays.items())


def arrays(seed: list[int], lay: Lay) -> dict[str, np.ndarray]:
    """Return integers, whose sums are exact in any order."""
    random = np.random.default_rng(seed)
    return {name: lay(random.integers(-9, 9, shape).astype("f")) for name, shape in SHAPES.items()}


def train(
    comm: CommunicatorBase, lay: Lay, lay_gradients: Lay, settings: dict[str, Any]
) -> chainer.Link:
    model = Filters(lay)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, **settings
    ).setup(model)
    for step in range(STEPS):
        optimizer.update(model, arrays([comm.rank, step], lay_gradients))
    optimizer.compare_replicas()
    return model


SETTINGS: dict[str, dict[str, Any]] = {
    "blocking": {"overlap": False},
    "overlap": {"overlap": True},
    "accumulation": {"accumulate": 2},
    "double buffering": {"double_buffering": True},
    "local SGD": {"local": LocalSGD(period=2)},
    "PowerSGD": {"compression": PowerSGD(rank=1, min_ratio=1)},
    "TopK": {"compression": TopK(density=0.2, min_size=12)},
    "quantization": {"compression": Quantization(block=16, min_size=12), "overlap": True},
}


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_training_is_the_same(comm: CommunicatorBase, settings: dict[str, Any]) -> None:
    expected = train(comm, as_chainer, as_chainer, settings)
    is_last = comm.rank == comm.size - 1
    for lay, lay_gradients in [
        (channels_last, channels_last),
        (channels_last, as_chainer),
        (channels_last if is_last else as_chainer, as_chainer if is_last else channels_last),
    ]:
        model = train(comm, lay, lay_gradients, settings)
        for (name, parameter), (_, other) in zip(
            model.namedparams(), expected.namedparams(), strict=True
        ):
            np.testing.assert_array_equal(parameter.array, other.array, name)
        if comm.size > 1 or lay is channels_last:
            found = {name for name in SHAPES if is_channels_last(getattr(model, name).array)}
            assert found == {"a", "d"}


@pytest.mark.mpi(1, 3)
def test_gradients_are_averaged_where_they_lie(comm: CommunicatorBase) -> None:
    model = Filters(channels_last)
    for name, array in arrays([comm.rank], channels_last).items():
        getattr(model, name).grad = array
    before = {name: getattr(model, name).grad for name in SHAPES}
    comm.multi_node_mean_grad(model)
    everywhere = [arrays([rank], as_chainer) for rank in range(comm.size)]
    for name in SHAPES:
        mean = sum(each[name] for each in everywhere) / np.float32(comm.size)
        np.testing.assert_allclose(before[name], mean, rtol=1e-6)
        assert getattr(model, name).grad is before[name]


@pytest.mark.mpi(2)
def test_parameters_that_are_laid_out_during_an_exchange(comm: CommunicatorBase) -> None:
    """A forward may do so while the last gradients are exchanged in the background."""
    shape, n_steps = (64, 8, 16, 16), 20
    values = np.arange(np.prod(shape), dtype="f").reshape(shape) % 7
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(np.zeros(shape, "f"))

    def loss(step: int) -> chainer.Variable:
        is_last = (step + comm.rank) % 3 == 0
        model.w.array = channels_last(model.w.array) if is_last else model.w.array.copy()
        return F.sum(model.w * values)

    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(1), comm, double_buffering=True
    ).setup(model)
    for step in range(n_steps):
        optimizer.update(loss, step)
    optimizer.wait()
    np.testing.assert_array_equal(model.w.array, (2 - n_steps) * values)


@pytest.mark.mpi(2)
def test_missing_gradients(comm: CommunicatorBase) -> None:
    model = Filters(channels_last)
    if comm.rank == 1:
        for name, array in arrays([0], channels_last).items():
            getattr(model, name).grad = array
    comm.multi_node_mean_grad(model, zero_fill=True)
    for name, array in arrays([0], as_chainer).items():
        np.testing.assert_array_equal(getattr(model, name).grad, array / 2)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("rank", [0, 1])
def test_bcast_data(comm: CommunicatorBase, rank: int) -> None:
    """All ranks use channels last if any does; its array is written to in place."""
    model = Filters(channels_last if comm.rank == rank else as_chainer, comm.rank)
    expected, own = Filters(), model.a.array
    comm.bcast_data(model)
    for name in SHAPES:
        values = getattr(expected, name).array
        np.testing.assert_array_equal(getattr(model, name).array, values, strict=True)
    assert is_channels_last(model.a.array)
    assert np.shares_memory(model.a.array, own) == (comm.rank == rank)


@pytest.mark.mpi(2)
def test_arrays_and_files(comm: CommunicatorBase, tmp_path: Path) -> None:
    values = Filters().a.array
    lay = channels_last if comm.rank else as_chainer
    total = comm.allreduce(lay(values))
    np.testing.assert_array_equal(total, 2 * values)
    chainer.serializers.save_npz(tmp_path / "model.npz", Filters(lay))
    with np.load(tmp_path / "model.npz") as file:
        np.testing.assert_array_equal(file["a"], values)
    loaded = Filters(channels_last, seed=1)
    chainer.serializers.load_npz(tmp_path / "model.npz", loaded)
    np.testing.assert_array_equal(loaded.a.array, values)
    assert is_channels_last(loaded.a.array)


@pytest.mark.mpi(1)
def test_memory_of_a_compression_in_another_order(comm: CommunicatorBase) -> None:
    """What is left to send is the same, whatever order a resumed job uses."""

    def left_by(lay: Lay) -> np.ndarray:
        compression = TopK(density=0.2, min_size=12)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(), comm, compression=compression
        ).setup(Filters(lay))
        for step in range(STEPS):
            optimizer.update(optimizer.target, arrays([step], lay))
        return optimizer.pending().arrays["/a"]["unsent"]

    np.testing.assert_array_equal(left_by(channels_last), left_by(as_chainer))
