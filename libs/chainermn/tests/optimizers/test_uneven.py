"""Ranks with different numbers of batches, in a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import optimizers
from chainer.training import extensions

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.compression import TopK
from chainermn.extensions import multi_node_snapshot
from chainermn.optimizers import LocalSGD
from libs.chainermn.tests.optimizers.small_job import BATCH, Network, assert_close, assert_replicas

EPOCHS = 3

#: The number of examples per rank, by number of ranks.
COUNTS = {1: [6], 2: [10, 4], 3: [3, 11, 6]}


class Noting(Network):
    """A model that notes what it is trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Any, t: Any) -> Any:
        if chainer.config.train:
            self.seen += x[:, 0].tolist()
        return super().forward(x, t)


def examples(rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng([rank, size]).normal(size=(COUNTS[size][rank], 3))
    return x, np.sin(x[:, :2])


def trainer_of(comm: CommunicatorBase, out: Path, epochs: int = EPOCHS, **settings: Any) -> Any:
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.MomentumSGD(0.1), comm, **settings
    ).setup(Noting())
    data = chainer.datasets.TupleDataset(*examples(comm.rank, comm.size))
    # Chainer's iterator fills the last batch of an epoch with examples of the next one.
    iterator = WithoutRest(data, BATCH, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return chainer.training.Trainer(updater, (epochs, "epoch"), out=str(out))


class WithoutRest(chainer.iterators.SerialIterator):
    """An iterator that ends an epoch with a smaller batch."""

    def __next__(self) -> Any:
        n = len(self.dataset)
        self.batch_size = min(BATCH, n - self.current_position)
        return super().__next__()

    next = __next__


def simulate(size: int) -> chainer.Link:
    """Train in one process, stepping on the mean of the ranks that have a batch."""
    model = Network()
    optimizer = optimizers.MomentumSGD(0.1).setup(model)
    n_steps = max(-(-count // BATCH) for count in COUNTS[size])
    for epoch in range(EPOCHS):
        for step in range(n_steps):
            gradients = []
            for rank in range(size):
                x, t = (part[step * BATCH : (step + 1) * BATCH] for part in examples(rank, size))
                if len(x):
                    model.cleargrads()
                    model(x, t).backward()
                    gradients.append({name: p.grad for name, p in model.namedparams()})
            if epoch == step == 0:
                continue  # the first update makes the replicas equal
            for name, parameter in model.namedparams():
                parameter.grad = np.mean([each[name] for each in gradients], axis=0)
            optimizer.update()
    return model


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize(
    "settings", [{}, {"overlap": True}, {"scale": 8.0}, {"scale": 8.0, "overlap": True}], ids=str
)
def test_the_mean_is_over_the_ranks_that_have_a_batch(
    comm: CommunicatorBase, settings: dict[str, Any], shared_tmp_path: Path
) -> None:
    settings = dict(settings)
    scale = settings.pop("scale", None)
    trainer = trainer_of(comm, shared_tmp_path, uneven=True, **settings)
    optimizer = trainer.updater.get_optimizer("main")
    if scale:
        optimizer.set_loss_scale(scale)
    evaluated = []
    evaluator = extensions.Evaluator(
        WithoutRest(chainer.datasets.TupleDataset(*examples(0, comm.size)), 2, repeat=False),
        optimizer.target,
    )
    evaluator.evaluate = lambda: evaluated.append(optimizer.t) or {}
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    trainer.extend(multi_node_snapshot(comm, extensions.snapshot(), []))
    trainer.run()
    assert_close(optimizer.target, simulate(comm.size))
    assert_replicas(comm, optimizer.target)
    per_epoch = max(-(-count // BATCH) for count in COUNTS[comm.size])
    assert evaluated == [per_epoch * (epoch + 1) - 1 for epoch in range(EPOCHS)]
    own = examples(comm.rank, comm.size)[0][:, 0]
    assert sorted(optimizer.target.seen) == sorted(own.tolist() * EPOCHS)


@pytest.mark.mpi(2)
def test_resumes(comm: CommunicatorBase, shared_tmp_path: Path) -> None:
    def run(epochs: int, out: Path) -> Any:
        trainer = trainer_of(comm, out, epochs, uneven=True)
        # Each rank has its own examples, so each has a snapshot.
        snapshot = extensions.snapshot(autoload=True, filename="snapshot_{.updater.epoch}")
        trainer.extend(multi_node_snapshot(comm, snapshot, [0, 1]), trigger=(1, "epoch"))
        trainer.run()
        comm.allgather_obj(None)
        return trainer.updater.get_optimizer("main").target

    unbroken = run(4, shared_tmp_path / "unbroken")
    run(2, shared_tmp_path)
    resumed = run(4, shared_tmp_path)
    assert_close(resumed, unbroken, rtol=0)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_that_one_rank_alone_uses_and_loss_scaling(overlap: bool) -> None:
    comm = chainermn.create_communicator("naive")
    model = chainer.Link()
    with model.init_scope():
        model.both = chainer.Parameter(np.ones(2))
        model.one = chainer.Parameter(np.ones(2))
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(0.25), comm, overlap=overlap
    ).setup(model)
    optimizer.set_loss_scale(16.0)
    for _ in range(4):
        optimizer.update(lambda: F.sum(model.both) + (F.sum(model.one) if comm.rank == 0 else 0))
    np.testing.assert_array_equal(model.both.array, 1 - 3 * 0.25)
    np.testing.assert_array_equal(model.one.array, 1 - 3 * 0.25 / 2)


@pytest.mark.mpi(2)
def test_a_parameter_that_has_two_names(comm: CommunicatorBase) -> None:
    model = chainer.ChainList(chainer.Link(), chainer.Link())
    with model[0].init_scope():
        model[0].w = chainer.Parameter(np.zeros(3))
    with model[1].init_scope():
        model[1].same = model[0].w
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, uneven=True)
    optimizer.setup(model)
    seen = []
    optimizer.add_hook(lambda optimizer: seen.append(model[0].w.grad.tolist()), "look")
    optimizer.update(lambda: F.sum(model[0].w))  # makes the replicas equal
    if comm.rank == 0:
        optimizer.update(lambda: F.sum(model[0].w))
    optimizer.new_epoch()
    assert seen == [[1.0] * 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"double_buffering": True},
        {"zero_fill": False},
        {"accumulate": 2},
        {"local": LocalSGD()},
        {"compression": TopK()},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_does_not_go_together(comm: CommunicatorBase, settings: dict[str, Any]) -> None:
    (name,) = settings
    problem = rf"uneven=True lets ranks .* without a gradient: leave out {name}(=False)?$"
    with pytest.raises(ValueError, match=problem):
        chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, uneven=True, **settings)
