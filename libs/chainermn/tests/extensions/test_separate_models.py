"""Evaluators of models that ranks have trained apart from each other."""

from __future__ import annotations

import warnings
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.training import StandardUpdater, Trainer
from chainer.training.extensions import Evaluator

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.extensions import GenericMultiNodeEvaluator, create_multi_node_evaluator

DATA = np.ones((4, 2), "f")


class Averaging(NaiveCommunicator):
    """A user's communicator, of which nothing is known."""

    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        super().multi_node_mean_grad(model, zero_fill)


class Model(chainer.Chain):
    def __init__(self, seed: int, width: int = 1) -> None:
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.layer = L.Linear(2, width)

    def forward(self, x: Any) -> chainer.Variable:
        loss = F.mean(self.layer(x) ** 2)
        chainer.report({"loss": loss}, self)
        return loss


def batches(repeat: bool) -> chainer.iterators.SerialIterator:
    return chainer.iterators.SerialIterator(DATA, 2, repeat=repeat)


def evaluator_of(comm: Any, model: chainer.Link, generic: bool) -> Any:
    if generic:
        return GenericMultiNodeEvaluator(comm, batches(False), model)
    return create_multi_node_evaluator(Evaluator(batches(False), model), comm)


def warnings_of(*evaluators: Any) -> list[str]:
    """Return the warnings of two evaluations by each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for evaluator in evaluators:
            evaluator(None)
            evaluator(None)
    return [str(each.message).split(":")[0] for each in caught]


@pytest.mark.mpi(2)
@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_trainer_without_a_multi_node_optimizer(
    comm: CommunicatorBase, generic: bool, before: bool, tmp_path: Any
) -> None:
    model = Model(comm.rank)
    updater = StandardUpdater(batches(True), chainer.optimizers.SGD(0.1).setup(model))
    trainer = Trainer(updater, (3, "iteration"), out=str(tmp_path))
    evaluator, kinds = evaluator_of(comm, model, generic), []
    trainer.extend(evaluator, trigger=(1, "iteration"), name="it", call_before_training=before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.extend(
            lambda trainer: kinds.append((updater.iteration, len(caught))),
            name="note",
            trigger=(1, "iteration"),
            priority=0,
            call_before_training=True,
        )
        trainer.run()
    n = int(comm.rank == 0)
    assert kinds == [(0, 0), (1, n), (2, n), (3, n)]
    name = "GenericMultiNodeEvaluator" if generic else "create_multi_node_evaluator"
    expected = f"{name}: the result is a mean over different models, because nothing has been"
    assert [str(each.message).startswith(expected) for each in caught] == [True] * n


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    "case", ["plain", "averaged", "equal", "other shapes", "a user's", "a chain", "one rank"]
)
def test_evaluations_without_a_trainer(comm: CommunicatorBase, case: str) -> None:
    used: Any = comm
    model: Any = Model(
        0 if case == "equal" else comm.rank, 1 + comm.rank * (case == "other shapes")
    )
    if case == "averaged":
        model.cleargrads()
        comm.allreduce_grad(model, zero_fill=True)
    elif case == "a user's":
        used = Averaging(comm.mpi_comm)  # type: ignore[attr-defined]
    elif case == "a chain":
        chain = chainermn.MultiNodeChainList(comm)
        chain.add_link(model)
        model = chain
    elif case == "one rank":
        used = comm.split(comm.rank, 0)
    else:
        comm.bcast_data(Model(0))  # which averages nothing
    found = warnings_of(*(evaluator_of(used, model, generic) for generic in (False, True)))
    expected = ["create_multi_node_evaluator", "GenericMultiNodeEvaluator"]
    assert found == expected * (case == "plain" and comm.rank == 0)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"double_buffering": True}], ids=str)
def test_loops_of_a_multi_node_optimizer(comm: CommunicatorBase, settings: Any) -> None:
    model = Model(0)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **settings)
    optimizer.setup(model)
    for _ in range(3):
        optimizer.update(model, DATA[: 1 + comm.rank])
    model.layer.W.array += comm.rank
    assert warnings_of(evaluator_of(comm, model, False)) == []
