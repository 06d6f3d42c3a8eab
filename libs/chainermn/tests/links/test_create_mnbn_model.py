"""Models with batch normalization, converted to normalize over all ranks."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.links import MultiNodeBatchNormalization, create_mnbn_model


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """Make all ranks initialize models with the same random weights."""
    np.random.seed(0)


class Block(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.fc = L.Linear(3, 3)
            self.bn = L.BatchNormalization(3, decay=0.7, eps=1e-3)
            self.twin = self.bn
        self.plain_attribute = self.bn

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        return F.relu(self.bn(self.fc(x)) + self.plain_attribute(self.twin(x)))


class Renamed(L.BatchNormalization):
    pass


MODELS = {
    "layer": lambda: L.BatchNormalization(3),
    "chain": Block,
    "list": lambda: chainer.ChainList(L.Linear(3, 3), L.BatchNormalization(3), Block()),
    "sequential": lambda: chainer.Sequential(L.Linear(3, 3), L.BatchNormalization(3), F.relu),
    "nested": lambda: chainer.Sequential(
        chainer.Sequential(Block(), F.tanh), chainer.Sequential(L.BatchNormalization(axis=0))
    ),
    "none": lambda: L.Linear(3, 3),
}


def x_of(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(4 * size, 3)).astype("f")[4 * rank : 4 * rank + 4]


def state(model: chainer.Link) -> dict[str, np.ndarray]:
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    return {name: np.array(value) for name, value in serializer.target.items()}


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("kind", MODELS)
def test_all_state_is_carried_over(comm: CommunicatorBase, kind: str) -> None:
    model = MODELS[kind]()
    if callable(getattr(model, "forward", None)):
        model(x_of(comm.rank, comm.size))
    before = state(model)
    kinds = [type(link) for link in model.links()]
    converted = create_mnbn_model(model, comm)
    assert [type(link) for link in model.links()] == kinds
    assert [type(link) for link in converted.links()] == [
        MultiNodeBatchNormalization if kind is L.BatchNormalization else kind for kind in kinds
    ]
    assert [name for name, _ in converted.namedlinks()] == [n for n, _ in model.namedlinks()]
    after = state(converted)
    assert after.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    for (_, own), (_, other) in zip(
        sorted(converted.namedparams()), sorted(model.namedparams()), strict=True
    ):
        assert own is not other
        own.array[...] = 9
    for name, value in state(model).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("kind", ["layer", "chain", "sequential", "nested"])
def test_computes_as_the_original_on_the_whole_batch(comm: CommunicatorBase, kind: str) -> None:
    model = MODELS[kind]()
    converted = create_mnbn_model(model, comm)
    whole = np.concatenate([x_of(rank, comm.size) for rank in range(comm.size)])
    expected = model(whole).array[4 * comm.rank : 4 * comm.rank + 4]
    y = converted(x_of(comm.rank, comm.size))
    np.testing.assert_allclose(y.array, expected, rtol=1e-4, atol=1e-5)
    theirs = state(model)
    for name, value in state(converted).items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.mpi(1, 3)
def test_one_layer_in_several_places_stays_one(comm: CommunicatorBase) -> None:
    block = create_mnbn_model(Block(), comm)
    assert block.bn is block.twin is block.plain_attribute
    assert (block.bn.decay, block.bn.eps, block.bn.name) == (0.7, 1e-3, "twin")
    assert block.bn.comm is comm


@pytest.mark.mpi(1, 3)
def test_twice_is_once(comm: CommunicatorBase) -> None:
    once = create_mnbn_model(MODELS["nested"](), comm)
    twice = create_mnbn_model(once, comm)
    assert [type(link) for link in twice.links()] == [type(link) for link in once.links()]


@pytest.mark.mpi(1, 3)
def test_subclasses_stay_what_they_are(comm: CommunicatorBase) -> None:
    model = chainer.Sequential(Renamed(3), L.BatchRenormalization(3))
    converted = create_mnbn_model(model, comm)
    assert [type(link) for link in converted] == [Renamed, L.BatchRenormalization]
