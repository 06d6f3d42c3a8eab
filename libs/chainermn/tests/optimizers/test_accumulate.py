"""Gradients accumulated over several batches, as if from one batch as large as all of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import optimizers

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.compression import TopK
from chainermn.gradients.exchange import GradientExchange
from libs.chainermn.tests.optimizers.small_job import (
    BATCH,
    N_EXAMPLES,
    Network,
    assert_close,
    assert_replicas,
    examples,
    make_trainer,
    resume,
    resume_from_rank_0,
    values,
)

SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"overlap": True}, {"double_buffering": True}], ids=str
)


def trainer_of(
    comm: CommunicatorBase,
    out: Path,
    iterations: int,
    n_examples: int = N_EXAMPLES,
    **settings: Any,
) -> chainer.training.Trainer:
    model: Any = Network()
    model.steps = []
    optimizer = chainermn.create_multi_node_optimizer(optimizers.Adam(0.01), comm, **settings)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.1))
    optimizer.add_hook(lambda optimizer: model.steps.append(model.a.W.grad.sum()), "steps")
    return make_trainer(optimizer, out, iterations, n_examples)


def expected(size: int, accumulate: int, iterations: int, first: int) -> Network:
    """Train in one process; ``first`` is the first iteration that counts."""
    model = Network()
    optimizer = optimizers.Adam(0.01).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.1))
    x, t = examples()
    per_rank = N_EXAMPLES // size
    per_epoch = per_rank // BATCH
    batch: list[int] = []
    n_batches = 0
    for iteration in range(iterations):
        place = iteration % per_epoch
        if iteration >= first:
            for rank in range(size):
                start = rank * per_rank + place * BATCH
                batch += range(start, start + BATCH)
            n_batches += 1
        ends_epoch = place == per_epoch - 1
        if n_batches == accumulate or (ends_epoch and n_batches):
            optimizer.update(model, x[batch], t[batch])
            batch, n_batches = [], 0
    return model


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_as_a_batch_so_many_times_as_large(
    comm: CommunicatorBase, accumulate: int, overlap: bool, shared_tmp_path: Path
) -> None:
    """Epochs of 30, 15 or 10 iterations may end in between."""
    settings: Any = {"accumulate": accumulate, "overlap": overlap}
    trainer = trainer_of(comm, shared_tmp_path, 64, **settings)
    trainer.run()
    # The first update makes the replicas equal.
    reference = expected(comm.size, accumulate, 64, first=1)
    model: Any = trainer.updater.get_optimizer("main").target
    assert_close(model, reference)
    assert trainer.updater.get_optimizer("main").t == len(model.steps)


@pytest.mark.mpi(2)
def test_double_buffering(comm: CommunicatorBase, shared_tmp_path: Path) -> None:
    """Each step uses the mean of the batches accumulated one step earlier."""
    plain, late = (
        trainer_of(comm, shared_tmp_path, 45, accumulate=3, double_buffering=late)
        for late in (False, True)
    )
    plain.run()
    late.run()
    n_plain, n_late = (
        len(each.updater.get_optimizer("main").target.steps) for each in (plain, late)
    )
    assert n_late == n_plain - 1
    first: Any = plain.updater.get_optimizer("main").target
    second: Any = late.updater.get_optimizer("main").target
    assert first.steps[0] == pytest.approx(second.steps[0], rel=1e-12)
    late.updater.get_optimizer("main").wait()


@pytest.mark.mpi(2)
def test_exchanges_once(comm: CommunicatorBase, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, accumulate=4)
    model = Network()
    optimizer.setup(model)
    batch = [part[:2] for part in examples()]
    optimizer.update(model, *batch)  # makes the replicas equal
    calls = []
    mean = GradientExchange.mean
    monkeypatch.setattr(GradientExchange, "mean", lambda *args: calls.append(0) or mean(*args))
    for number in range(12):
        optimizer.update(model, *batch)
        assert len(calls) == (number + 1) // 4
        assert optimizer.t == (number + 1) // 4


@pytest.mark.mpi(2)
@pytest.mark.parametrize("scale", [None, 16.0])
def test_loss_scaling(comm: CommunicatorBase, scale: float | None, shared_tmp_path: Path) -> None:
    scaled = trainer_of(comm, shared_tmp_path, 20, accumulate=2)
    optimizer: Any = scaled.updater.get_optimizer("main")
    optimizer.loss_scaling(scale=scale)
    optimizer.remove_hook("GradientClipping")
    plain_without = trainer_of(comm, shared_tmp_path, 20, accumulate=2)
    plain_without.updater.get_optimizer("main").remove_hook("GradientClipping")
    scaled.run()
    plain_without.run()
    assert_close(optimizer.target, plain_without.updater.get_optimizer("main").target)


@pytest.mark.mpi(2)
def test_with_compression(comm: CommunicatorBase, shared_tmp_path: Path) -> None:
    settings: Any = {"accumulate": 3, "compression": TopK(density=0.25, min_size=4)}
    trainers = [
        trainer_of(comm, shared_tmp_path, 40, overlap=o, **settings) for o in (False, True)
    ]
    for trainer in trainers:
        trainer.run()
    models = [trainer.updater.get_optimizer("main").target for trainer in trainers]
    assert_close(*models, rtol=0)
    assert_replicas(comm, models[0])


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("kind", ["checkpointer", "snapshot"])
@pytest.mark.parametrize("compression", [None, TopK(density=0.25, min_size=4)], ids=["", "TopK"])
def test_resumed_in_the_middle_of_a_batch(
    comm: CommunicatorBase, kind: str, compression: Any, shared_tmp_path: Path
) -> None:
    make = functools.partial(trainer_of, comm, accumulate=4, compression=compression)
    unbroken, resumed = resume(make, kind, comm, shared_tmp_path)
    assert resumed.t == unbroken.t
    assert_close(resumed.target, unbroken.target, rtol=0)
    # What has been sent since then is not in later snapshots.
    saved, expected = (
        {name: sorted(arrays) for name, arrays in each.pending().arrays.items()}
        for each in (resumed, unbroken)
    )
    assert saved == expected


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("iterations", "is_lost"), [(7, True), (9, False)])
def test_a_plain_snapshot_of_rank_0(iterations: int, is_lost: bool, shared_tmp_path: Path) -> None:
    """After the first update, the optimizer steps in the 5th, the 9th and so on."""
    comm = chainermn.create_communicator("naive")
    make = functools.partial(trainer_of, comm, accumulate=4)
    optimizer = resume_from_rank_0(make, comm, shared_tmp_path, iterations, is_lost)
    assert all(np.isfinite(array).all() for array in values(optimizer.target).values())
    assert_replicas(comm, optimizer.target)


@pytest.mark.mpi(2)
@SETTINGS
@pytest.mark.parametrize("accumulate", [2, 3, 4, 8])
def test_epochs_that_end_at_different_times(
    comm: CommunicatorBase, settings: dict[str, Any], accumulate: int, shared_tmp_path: Path
) -> None:
    """This fails even if one rank's epoch ends just when the other's count is full."""
    # 7 and 6 examples: 4 and 3 batches per epoch.
    settings = {**settings, "accumulate": accumulate}
    trainer = trainer_of(comm, shared_tmp_path, 40, n_examples=13, **settings)
    with pytest.raises(ValueError, match=r"an epoch ends with different .*force_equal_length"):
        trainer.run(show_loop_exception_msg=False)


@pytest.mark.mpi(2)
def test_an_epoch_that_ends_with_a_full_count(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    trainer = trainer_of(comm, shared_tmp_path, 45, accumulate=5)
    trainer.run()
    model: Any = trainer.updater.get_optimizer("main").target
    assert_close(model, expected(comm.size, 5, 45, first=1))


@pytest.mark.mpi(2)
def test_gradients_that_share_an_array_at_the_end_of_an_epoch(comm: CommunicatorBase) -> None:
    model = chainer.ChainList(chainer.Link(), chainer.Link())
    for link in model:
        with link.init_scope():
            link.w = chainer.Parameter(np.zeros(3))
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, accumulate=4)
    optimizer.setup(model)
    for _ in range(3):  # the first makes the replicas equal
        optimizer.update(lambda: F.sum(model[0].w + model[1].w) + F.sum(model[1].w))
    optimizer.new_epoch()
    np.testing.assert_allclose(model[0].w.array, -1)
    np.testing.assert_allclose(model[1].w.array, -2)


@pytest.mark.mpi(1, 2)
def test_resumed_with_another_loss_scale(comm: CommunicatorBase, shared_tmp_path: Path) -> None:
    def make(scale: float) -> Any:
        model = chainer.Link()
        with model.init_scope():
            model.w = chainer.Parameter(np.zeros(2))
        optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, accumulate=3)
        optimizer.setup(model).set_loss_scale(scale)
        optimizer.update(lambda: F.sum(model.w))
        return optimizer

    optimizer = make(16.0)
    for _ in range(2):
        optimizer.update(lambda: F.sum(optimizer.target.w))
    file = str(shared_tmp_path / f"optimizer.{comm.rank}")
    chainer.serializers.save_npz(file, optimizer)
    resumed = make(2.0)
    chainer.serializers.load_npz(file, resumed)
    resumed.update(lambda: F.sum(resumed.target.w))
    np.testing.assert_allclose(resumed.target.w.array, -1)


@pytest.mark.mpi(1, 2)
def test_a_snapshot_does_not_reach_the_next_link(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")

    def model_of(*shape: int) -> Any:
        model = chainer.Link()
        with model.init_scope():
            model.w = chainer.Parameter(np.ones(shape))
        return model

    def make() -> Any:
        optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, accumulate=2)
        return optimizer.setup(model_of(2))

    optimizer = make()
    for _ in range(2):  # the first one makes the replicas equal
        optimizer.update(lambda: F.sum(optimizer.target.w))
    file = str(shared_tmp_path / f"optimizer.{comm.rank}")
    chainer.serializers.save_npz(file, optimizer)
    resumed = make()
    chainer.serializers.load_npz(file, resumed)
    resumed.setup(model_of(3))
    for _ in range(3):
        resumed.update(lambda: F.sum(resumed.target.w))
    np.testing.assert_array_equal(resumed.target.w.array, [0, 0, 0])


@pytest.mark.mpi(2)
def test_ranks_that_give_different_settings(comm: CommunicatorBase) -> None:
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(), comm, accumulate=2 + comm.rank
    ).setup(Network())
    with pytest.raises(ValueError, match=r"rank 0: .*accumulate=2; rank 1: .*accumulate=3"):
        optimizer.update(optimizer.target, *examples())


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "2"])
def test_what_accumulate_takes(comm: CommunicatorBase, accumulate: Any) -> None:
    with pytest.raises(ValueError, match="accumulate must be an integer of at least 1, got"):
        chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, accumulate=accumulate)


def test_it_needs_the_loss(comm: CommunicatorBase) -> None:
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, accumulate=2)
    optimizer.setup(Network())
    with pytest.raises(ValueError, match=r"accumulate=2 needs update\(lossfun, \.\.\.\)"):
        optimizer.update()
