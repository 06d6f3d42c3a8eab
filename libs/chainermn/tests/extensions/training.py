"""A small job, for tests that stop and resume it."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.training import StandardUpdater, Trainer

import chainermn


def make_trainer(
    comm: Any, out: Any, iterations: int, width: int = 3, seed: int = 0, order: str = "fixed"
) -> Trainer:
    """Return a trainer whose model and data set depend only on the arguments.

    The order of its 12 examples is ``fixed``, ``shuffled`` on each rank, or ``sampled`` among all.
    """
    np.random.seed(seed + comm.rank)
    with chainer.using_config("dtype", np.float64):
        network = chainer.Sequential(
            L.Linear(2, width), L.BatchNormalization(width), L.Linear(width, 1)
        )
    model = L.Classifier(network, lossfun=F.mean_squared_error)
    model.compute_accuracy = False
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(0.1), comm)
    optimizer.setup(model)
    x = np.random.default_rng(0).normal(size=(12, 2))
    data = chainer.datasets.TupleDataset(x, x.sum(axis=1, keepdims=True))
    if order == "sampled":
        how = {"order_sampler": chainermn.create_distributed_sampler(data, comm, seed=1)}
    else:
        data, how = chainermn.scatter_dataset(data, comm), {"shuffle": order == "shuffled"}
    iterator = chainer.iterators.SerialIterator(data, 2, **how)
    updater = StandardUpdater(iterator, optimizer)
    return Trainer(updater, (iterations, "iteration"), out=str(out))


def run_until_it_fails(trainer: Trainer, iteration: int) -> None:
    """Train until an extension raises after an iteration."""

    def fail(trainer: Trainer) -> None:
        if trainer.updater.iteration == iteration:
            raise ZeroDivisionError("by design")

    trainer.extend(fail, trigger=(1, "iteration"))
    with pytest.raises(ZeroDivisionError):
        trainer.run()


def counter(value: float = 0) -> chainer.Link:
    link = chainer.Link()
    with link.init_scope():
        link.x = chainer.Parameter(np.full(3, value))
    return link


def optimizer_of(trainer: Trainer) -> Any:
    return trainer.updater.get_optimizer("main")


def state_of(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return what training has produced: parameters, statistics and the optimizer's state."""
    optimizer = optimizer_of(trainer)
    saved = chainer.serializers.npz.serialize(optimizer.target)
    saved.update(chainer.serializers.npz.serialize(optimizer))
    return {name: np.array(value) for name, value in saved.items()}


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
