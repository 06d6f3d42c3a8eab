"""Models split over several ranks, against the same model in one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.links import MultiNodeChainList


class Stage(chainer.Chain):
    """A layer that takes any number of inputs and adds them up."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        with self.init_scope():
            self.fc = L.Linear(4, 4, initialW=generator.normal(size=(4, 4)) / 2)

    def forward(self, *xs: chainer.Variable) -> chainer.Variable:
        return F.tanh(self.fc(sum(xs)))


class Divide(chainer.Chain):
    """A layer with two outputs."""

    def forward(self, x: chainer.Variable) -> tuple[chainer.Variable, ...]:
        return x * 2, x * 3


class Join(chainer.Chain):
    """A layer whose only argument is a tuple."""

    def forward(self, xs: tuple[chainer.Variable, ...]) -> chainer.Variable:
        return xs[0] - xs[1] * xs[1]


class Ignore(Stage):
    """A layer that uses only the first of its inputs."""

    def forward(self, *xs: chainer.Variable) -> chainer.Variable:
        return super().forward(xs[0])


def stages(count: int = 4) -> list[Stage]:
    with chainer.using_config("dtype", np.float64):
        links = [Stage(seed) for seed in range(count)]
    for link in links:
        link.cleargrads()
    return links


def x_(step: int = 0) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(5, 4))


def pipeline(comm: CommunicatorBase, links: list[Stage]) -> MultiNodeChainList:
    """Put stage i on rank i modulo size, with an edge from each stage to the next."""
    model = MultiNodeChainList(comm)
    for i, link in enumerate(links):
        if i % comm.size == comm.rank:
            model.add_link(
                link,
                None if i == 0 else (i - 1) % comm.size,
                None if i == len(links) - 1 else (i + 1) % comm.size,
            )
    return model


@pytest.mark.mpi(1, 3)
def test_training_equals_one_process(comm: CommunicatorBase) -> None:
    alone, links = chainer.Sequential(*stages()), stages()
    reference = chainer.optimizers.Adam(0.01).setup(alone)
    model = pipeline(comm, links)
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    last = (len(links) - 1) % comm.size

    def loss(x: np.ndarray, t: np.ndarray) -> chainer.Variable:
        y = model(x) if comm.rank == 0 else model()
        return F.mean_squared_error(y, t) if comm.rank == last else y

    for step in range(10):
        x, t = x_(2 * step), x_(2 * step + 1)
        reference.update(lambda x, t: F.mean_squared_error(alone(x), t), x, t)
        optimizer.update(loss, x, t)
    for i, link in enumerate(links):
        if i % comm.size == comm.rank:
            for own, other in zip(link.params(), alone[i].params(), strict=True):
                np.testing.assert_allclose(own.array, other.array, rtol=1e-12, atol=1e-14)


@pytest.mark.mpi(2, 3)
def test_branches(comm: CommunicatorBase) -> None:
    """Rank 0 sends to all others and to itself, then joins all their results."""
    first, *middle, last = stages(5)
    model = MultiNodeChainList(comm)
    everyone = list(range(comm.size))
    if comm.rank == 0:
        model.add_link(first, None, everyone)
        model.add_link(middle[0], 0, 0)
        model.add_link(last, everyone, None)
    else:
        model.add_link(middle[comm.rank], [0], (0,))

    copies = copy.deepcopy([first, *middle, last])
    start = copies[0](x_())
    expected = copies[-1](*(link(start) for link in copies[1 : comm.size + 1]))
    F.sum(expected * expected).backward()

    y = model(x_()) if comm.rank == 0 else model()
    if comm.rank == 0:
        np.testing.assert_allclose(y.array, expected.array, rtol=1e-12)
        F.sum(y * y).backward()
        pairs = [(first, copies[0]), (middle[0], copies[1]), (last, copies[-1])]
    else:
        assert (y.shape, y.dtype) == ((0,), np.float32)
        y.backward()
        pairs = [(middle[comm.rank], copies[comm.rank + 1])]
    for own, other in pairs:
        np.testing.assert_allclose(own.fc.W.grad, other.fc.W.grad, rtol=1e-12)


@pytest.mark.mpi(2)
def test_tuples_travel_as_one_argument(comm: CommunicatorBase) -> None:
    model = MultiNodeChainList(comm)
    x = chainer.Variable(x_())
    if comm.rank == 0:
        model.add_link(Divide(), None, [1, 0])
        model.add_link(Join(), 0, None)
        y = model(x)
        np.testing.assert_allclose(y.array, 2 * x.array - 9 * x.array**2)
        F.sum(y).backward()
        np.testing.assert_allclose(x.grad, 2 * (2 - 18 * x.array))
    else:
        model.add_link(Join(), 0, None)
        F.sum(model()).backward()


@pytest.mark.mpi(2)
def test_output_of_several_variables(comm: CommunicatorBase) -> None:
    model = MultiNodeChainList(comm)
    x = chainer.Variable(x_())
    if comm.rank == 0:
        model.add_link(Join(), 1, 1)
        model.add_link(Divide(), None, None)
        y, z = model(x)
        F.sum(y + z).backward()
        np.testing.assert_allclose(x.grad, np.full(x.shape, 5))
    else:
        model.add_link(Divide(), None, 0)
        model.add_link(chainer.Sequential(F.sin), 0, None)
        F.sum(model(x)).backward()
        y = 2 * x.array - 9 * x.array**2
        np.testing.assert_allclose(x.grad, np.cos(y) * (2 - 18 * x.array), rtol=1e-12)


@pytest.mark.mpi(2)
def test_received_but_unused_does_not_hang(comm: CommunicatorBase) -> None:
    stage, *_ = stages()
    with chainer.using_config("dtype", np.float64):
        ignoring = Ignore(1)
    model = MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(stage, None, 1)
        model.add_link(chainer.Sequential(F.sin), None, 1)
        model(x_()).backward()
        assert abs(stage.fc.W.grad).sum() > 0
    else:
        model.add_link(ignoring, [0, 0], None)
        F.sum(model()).backward()


@pytest.mark.mpi(2)
def test_nothing_that_was_received_is_used(comm: CommunicatorBase) -> None:
    model = MultiNodeChainList(comm)
    x = chainer.Variable(x_())
    if comm.rank == 0:
        model.add_link(chainer.Sequential(F.sin), None, 1)
        model(x).backward()
        np.testing.assert_array_equal(x.grad, np.zeros_like(x.array))
    else:
        w = chainer.Parameter(np.ones(()))

        class Constant(chainer.Chain):
            def forward(self, received: Any) -> chainer.Variable:
                return w * 2

        model.add_link(Constant(), 0, None)
        model().backward()
        assert w.grad == 2


@pytest.mark.mpi(1, 2)
def test_without_edges_it_is_the_link(comm: CommunicatorBase) -> None:
    model = MultiNodeChainList(comm)
    assert model(1) is None
    stage = stages()[0]
    model.add_link(stage)
    np.testing.assert_array_equal(model(x_(), x_(1)).array, stage(x_(), x_(1)).array)
    assert [name for name, _ in model.namedparams()] == ["/0/fc/W", "/0/fc/b"]
    model = MultiNodeChainList(comm)
    model.add_link(Divide())
    assert len(model(chainer.Variable(x_()))) == 2


@pytest.mark.mpi(2, 3)
def test_evaluation(comm: CommunicatorBase) -> None:
    links = stages()
    model = pipeline(comm, links)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        y = model(x_()) if comm.rank == 0 else model()
    if comm.rank == 3 % comm.size:
        np.testing.assert_allclose(y.array, chainer.Sequential(*links)(x_()).array, rtol=1e-12)
    assert y.creator is None


@pytest.mark.mpi(1, 2)
def test_copies_share_the_communicator(comm: CommunicatorBase) -> None:
    model = pipeline(comm, stages())
    for other in (copy.deepcopy(model), model.copy("copy"), model.copy()):
        assert other.comm is comm
        y = other(x_()) if comm.rank == 0 else other()
        assert y is not None
    other = pickle.loads(pickle.dumps(model))
    other.comm = comm
    y = other(x_()) if comm.rank == 0 else other()
    assert y.shape in ((5, 4), (0,))


@pytest.mark.mpi(1, 2)
def test_wrong_ranks(comm: CommunicatorBase) -> None:
    model = MultiNodeChainList(comm)
    here = f"on rank {comm.rank}"
    for wrong in (-1, 7, [0, 7], []):
        with pytest.raises(ValueError, match=f"rank_in {here}: expected ranks from 0 to"):
            model.add_link(Divide(), rank_in=wrong)
    for wrong in ("a", 1.5, [None]):
        with pytest.raises(TypeError, match=f"rank_out {here}: expected None, an int or a seq"):
            model.add_link(Divide(), rank_out=wrong)
    assert len(model) == 0


@pytest.mark.mpi(1, 2)
def test_two_outputs(comm: CommunicatorBase) -> None:
    model = MultiNodeChainList(comm)
    model.add_link(Divide())
    with pytest.raises(ValueError, match="a link with rank_out=None has been added before"):
        model.add_link(Divide())
    assert len(model) == 1


@pytest.mark.mpi(1, 2)
def test_input_from_this_rank_that_is_not_there(comm: CommunicatorBase) -> None:
    model = MultiNodeChainList(comm)
    model.add_link(Divide(), comm.rank, None)
    with pytest.raises(
        RuntimeError, match=f"on rank {comm.rank}: .* no earlier link has an output"
    ):
        model()
