"""Optimizers on communicators of users, whose only way to average is `multi_node_mean_grad`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizers

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.compression import TopK
from chainermn.optimizers import LocalSGD

pytestmark = pytest.mark.each_mpi

N_STEPS = 9


class Subclass(NaiveCommunicator):
    """A communicator of the library that also counts."""

    n_calls = 0

    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        self.n_calls += 1
        super().multi_node_mean_grad(model, zero_fill)


def forwarding(name: str) -> Any:
    if isinstance(inspect.getattr_static(CommunicatorBase, name), property):
        return property(lambda self: getattr(self.inner, name))
    return lambda self, *args, **kwds: getattr(self.inner, name)(*args, **kwds)


def with_nothing_else(inner: Subclass) -> CommunicatorBase:
    """Return a communicator that only has the methods that every communicator must have."""
    names = CommunicatorBase.__abstractmethods__  # type: ignore[attr-defined]
    kind = type("Other", (CommunicatorBase,), {name: forwarding(name) for name in names})
    made: Any = kind()
    made.inner = inner
    return made  # type: ignore[no-any-return]


def train(comm: Any, **settings: Any) -> list[Any]:
    """Train on the numbers that a generator draws for each rank, and return the parameters."""
    generator = np.random.default_rng(comm.rank)
    model = L.Linear(3, 2, initialW=chainer.initializers.Normal(1.0, rng=generator))
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, **settings)
    optimizer.setup(model)
    for _ in range(N_STEPS + comm.rank * ("uneven" in settings)):
        x = generator.normal(size=(4, 3)).astype("f")
        optimizer.update(lambda x=x: F.mean(model(x) ** 2))
    optimizer.new_epoch()
    return [parameter.array for parameter in model.params()]


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("make", [lambda inner: inner, with_nothing_else])
@pytest.mark.parametrize(
    ("settings", "n_means"),
    [
        ({}, N_STEPS - 1),
        ({"zero_fill": False, "overlap": "auto"}, N_STEPS - 1),
        ({"accumulate": 2}, N_STEPS // 2),
        ({"local": LocalSGD(period=3)}, -(-(N_STEPS - 1) // 3)),
        ({"uneven": True}, None),
    ],
)
def test_bits_are_those_of_the_library(
    make: Callable[[Any], Any], settings: dict[str, Any], n_means: int | None
) -> None:
    comm: Any = chainermn.create_communicator("naive")
    own = Subclass(comm.mpi_comm)
    expected = train(comm, **settings)
    for one, other in zip(train(make(own), **settings), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert own.n_calls == (N_STEPS + comm.size - 2 if n_means is None else n_means)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("make", [lambda inner: inner, with_nothing_else])
def test_what_only_the_library_does(make: Callable[[Any], Any]) -> None:
    own = Subclass(chainermn.create_communicator("naive").mpi_comm)
    comm = make(own)
    with pytest.raises(ValueError, match="does not compress gradients; communicators of"):
        chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, compression=TopK())
    with pytest.raises(RuntimeError, match="does not exchange in the background"):
        train(comm, double_buffering=True)
    if comm.rank:
        train(comm, overlap=True)
        return
    with pytest.warns(UserWarning, match="overlap=True has no effect: .* does not exchange in"):
        train(comm, overlap=True)
