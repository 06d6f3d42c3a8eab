"""Replicas that ranks make different by accident: repaired, or named on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizer_hooks, optimizers
from chainer.training import extensions

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers import LocalSGD
from libs.chainermn.tests.optimizers.small_job import Network as SmallJob
from libs.chainermn.tests.optimizers.small_job import assert_equal, make_trainer

pytestmark = pytest.mark.mpi(3)

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "double buffering": {"double_buffering": True},
    "accumulate": {"accumulate": 2},
    "local": {"local": LocalSGD(period=2, states="average")},
    "uneven": {"uneven": True},
    "top-k": {"compression": chainermn.compression.TopK(density=0.25, min_size=1)},
}
every_mode = pytest.mark.parametrize("mode", MODES)
on_two_ranks = pytest.mark.mpi(2)


class Network(chainer.Chain):
    """A layer with statistics between two others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        normal = chainer.initializers.Normal(1.0, rng=np.random.RandomState(seed))
        with self.init_scope():
            self.a = L.Linear(3, 4, initialW=normal)
            self.norm = L.BatchNormalization(4)
            self.b = L.Linear(4, 2, initialW=normal)

    def forward(self, x: Any) -> chainer.Variable:
        return F.mean(self.b(self.norm(self.a(x))) ** 2)


class LazyNetwork(Network):
    """A network with a layer that appears when it is first used."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        with self.init_scope():
            self.late = L.Linear(None, 2)

    def forward(self, x: Any, uses_late: bool = False) -> chainer.Variable:
        return super().forward(x) + (F.mean(self.late(x) ** 2) if uses_late else 0)


def batch(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=(4, 3)).astype("f")


def multi_node(
    comm: CommunicatorBase,
    seed: int = 0,
    actual: Any = None,
    network: type[Network] = Network,
    **settings: Any,
) -> Any:
    actual = actual or optimizers.Adam(0.05)
    return chainermn.create_multi_node_optimizer(actual, comm, **settings).setup(network(seed))


def train(optimizer: Any, steps: range, *args: Any) -> None:
    for step in steps:
        x = batch(optimizer.communicator.rank, step)
        optimizer.update(optimizer.target, x, *args)


def everything(optimizer: Any, *, statistics: bool = False) -> dict[str, np.ndarray]:
    """Return what a snapshot holds of a model and its optimizer."""
    saved: dict[str, Any] = {}
    serializer = chainer.serializers.DictionarySerializer(saved)
    optimizer.actual_optimizer.serialize(serializer["optimizer"])
    optimizer.target.serialize(serializer["model"])
    return {
        name: np.array(value)
        for name, value in saved.items()
        if statistics or not name.startswith("model/norm/avg")
    }


def assert_same_everywhere(comm: CommunicatorBase, own: dict[str, np.ndarray]) -> None:
    for other in comm.allgather_obj(own):
        assert_equal(other, own)


def save(optimizer: Any, folder: Path) -> None:
    chainer.serializers.save_npz(folder / "optimizer.npz", optimizer)
    chainer.serializers.save_npz(folder / "model.npz", optimizer.target)


def load(optimizer: Any, folder: Path) -> None:
    chainer.serializers.load_npz(folder / "model.npz", optimizer.target)
    chainer.serializers.load_npz(folder / "optimizer.npz", optimizer)


@pytest.fixture
def snapshot(comm: CommunicatorBase, tmp_path: Path) -> Path:
    """Return the folder of a snapshot after five steps."""
    optimizer = multi_node(comm, seed=1)
    train(optimizer, range(6))
    save(optimizer, tmp_path)
    return tmp_path


# ---- what rank 0 alone has loaded ----


@every_mode
@on_two_ranks
def test_first_update_gives_all_ranks_everything_that_rank_0_has_loaded(
    comm: CommunicatorBase, snapshot: Path, mode: str
) -> None:
    optimizer = multi_node(comm, seed=comm.rank + 2, **MODES[mode])
    if comm.rank == 0:
        load(optimizer, snapshot)
        before = everything(optimizer)
    optimizer.update(optimizer.target, batch(comm.rank, 0))
    now = everything(optimizer, statistics=True)
    assert_same_everywhere(comm, now)
    if comm.rank == 0:
        for name, value in before.items():
            np.testing.assert_array_equal(now[name], value, err_msg=name)


def test_training_goes_on_as_if_all_ranks_had_loaded_it(
    comm: CommunicatorBase, snapshot: Path
) -> None:
    alone, together = multi_node(comm, seed=comm.rank), multi_node(comm, seed=comm.rank)
    load(together, snapshot)
    if comm.rank == 0:
        load(alone, snapshot)
    train(alone, range(6, 12))
    train(together, range(7, 12))  # takes its first step at once
    assert_same_everywhere(comm, everything(alone))
    assert everything(alone)["optimizer/t"] == 10
    assert_equal(everything(together), everything(alone))


@every_mode
@on_two_ranks
def test_what_rank_0_alone_loads_later_becomes_everyones(
    comm: CommunicatorBase, snapshot: Path, mode: str
) -> None:
    optimizer = multi_node(comm, **MODES[mode])
    train(optimizer, range(5))
    if comm.rank == 0:
        load(optimizer, snapshot)
        optimizer.alpha = 0.25
    if mode in ("double buffering", "local"):
        optimizer.settle() if mode == "local" else optimizer.wait()
    train(optimizer, range(5, 7))
    optimizer.settle()
    assert_same_everywhere(comm, everything(optimizer))
    assert optimizer.alpha == 0.25


def test_only_another_rank_has_loaded_a_snapshot(comm: CommunicatorBase, tmp_path: Path) -> None:
    optimizer = multi_node(comm)
    train(optimizer, range(2))
    save(optimizer, tmp_path)
    if comm.rank == 1:
        load(optimizer, tmp_path)
    with pytest.raises(ValueError, match="rank 1 has loaded a snapshot, but rank 0 has not"):
        train(optimizer, range(1))


def test_each_rank_keeps_the_statistics_of_its_own_snapshot(
    comm: CommunicatorBase, tmp_path: Path
) -> None:
    saved = multi_node(comm)
    train(saved, range(4))
    save(saved, tmp_path)
    optimizer = multi_node(comm, seed=comm.rank)
    load(optimizer, tmp_path)
    train(saved, range(4, 6))
    train(optimizer, range(4, 6))
    own = everything(optimizer, statistics=True)
    assert_equal(own, everything(saved, statistics=True))
    others = comm.allgather_obj(own["model/norm/avg_mean"])
    assert not np.array_equal(others[0], others[1])


def test_statistics_follow_once_and_not_when_a_layer_appears(comm: CommunicatorBase) -> None:
    optimizer = multi_node(comm, seed=comm.rank, network=LazyNetwork)
    norm = optimizer.target.norm
    norm.avg_mean[...] = comm.rank + 1
    norm.N = 100 * (comm.rank + 1)
    train(optimizer, range(1))
    for name in ("avg_mean", "avg_var", "N"):
        of_ranks = comm.allgather_obj(getattr(norm, name))
        np.testing.assert_array_equal(of_ranks[1], of_ranks[0], err_msg=name)
    norm.avg_mean[...] = comm.rank
    with chainer.using_config("train", False):  # leaves the statistics alone
        train(optimizer, range(1, 4), True)
    assert optimizer.target.late.W.array is not None
    np.testing.assert_array_equal(norm.avg_mean, comm.rank)
    assert_same_everywhere(comm, everything(optimizer))


def test_equal_statistics_stay_those_of_the_ranks_own_batches(comm: CommunicatorBase) -> None:
    optimizer = multi_node(comm, seed=0)
    train(optimizer, range(1))
    expected = Network(seed=0)
    expected(batch(comm.rank, 0))
    np.testing.assert_array_equal(optimizer.target.norm.avg_mean, expected.norm.avg_mean)


def test_hyperparameters_and_loss_scale_of_rank_0_come_with_the_first_update(
    comm: CommunicatorBase,
) -> None:
    optimizer = multi_node(comm, actual=optimizers.MomentumSGD(0.1 * (comm.rank + 1)))
    optimizer.momentum = 0.5 / (comm.rank + 1)
    optimizer.loss_scaling(scale=2.0**comm.rank)
    if comm.rank != 1:
        optimizer.target.b.W.update_rule.hyperparam.lr = 0.01 / (comm.rank + 1)
    optimizer.target.a.b.update_rule.hyperparam.momentum = 0.0
    train(optimizer, range(4))
    assert (optimizer.lr, optimizer.momentum, optimizer._loss_scale) == (0.1, 0.5, 1.0)
    assert optimizer.target.b.W.update_rule.hyperparam.get_dict() == {"lr": 0.01, "momentum": 0.5}
    assert optimizer.target.a.b.update_rule.hyperparam.get_dict() == {"lr": 0.1, "momentum": 0.0}
    assert_same_everywhere(comm, everything(optimizer))


@every_mode
@on_two_ranks
def test_equal_replicas_take_no_broadcast(
    comm: CommunicatorBase, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = multi_node(comm, **MODES[mode])
    random.seed(0)
    np.random.seed(0)
    for name in ("bcast_obj", "bcast_data"):
        monkeypatch.setattr(comm, name, None)
    optimizer.update(optimizer.target, batch(0, 0))


def test_mixed_precision_states_follow(comm: CommunicatorBase, tmp_path: Path) -> None:
    def half() -> Any:
        with chainer.using_config("dtype", np.float16):
            model = L.Linear(3, 2, initialW=0.1)
        actual = optimizers.Adam(0.05)
        actual.use_fp32_update()
        return chainermn.create_multi_node_optimizer(actual, comm).setup(model)

    def step(optimizer: Any, number: int) -> None:
        x = batch(comm.rank, number).astype(np.float16)
        optimizer.update(lambda: F.mean(optimizer.target(x) ** 2))

    saved, alone = half(), half()
    for number in range(4):
        step(saved, number)
    save(saved, tmp_path)
    if comm.rank == 0:
        load(alone, tmp_path)
    for number in range(4):
        step(alone, number)
    own = everything(alone)
    assert own["optimizer/W/m"].dtype == np.float32
    assert_same_everywhere(comm, own)


# ---- what must be the same in each step ----


def differently(optimizer: Any, what: str) -> None:
    """Change something on this rank only."""
    model = optimizer.target
    if what == "hook":
        optimizer.add_hook(optimizer_hooks.WeightDecay(0.1))
    elif what == "rate":
        optimizer.remove_hook("Lasso")
        optimizer.add_hook(optimizer_hooks.Lasso(0.5))
    elif what == "rate of the same hook":
        optimizer._hookable._pre_update_hooks["Lasso"].rate = 0.5
    elif what == "learning rate":
        optimizer.alpha = 0.125
    elif what == "scale":
        optimizer.loss_scaling(scale=4.0)
    elif what == "frozen":
        model.b.disable_update()


DIFFERENCES = {
    "hook": "the hook WeightDecay differs between ranks.*: none on rank 0, .*rate=0.1.* on rank 1",
    "rate": "the hook Lasso differs.*rate=0.25.* on rank 0, .*rate=0.5.* on rank 1",
    "rate of the same hook": "the hook Lasso differs.*rate=0.25.* on rank 0, .*rate=0.5.*",
    "learning rate": "alpha differs between ranks.*: 0.05 on rank 0, 0.125 on rank 1",
    "scale": "the loss scale differs.*: None on rank 0, 4.0 on rank 1",
    "frozen": "the update of parameter /b/W differs.*: on on rank 0, off on rank 1",
}


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        *((what, "plain") for what in DIFFERENCES),
        *(("learning rate", mode) for mode in MODES if mode != "plain"),
    ],
)
def test_settings_of_one_rank_end_the_next_step(
    comm: CommunicatorBase, what: str, mode: str
) -> None:
    optimizer = multi_node(comm, **MODES[mode])
    optimizer.add_hook(optimizer_hooks.Lasso(0.25))
    train(optimizer, range(5))
    if comm.rank == 1:
        differently(optimizer, what)
    with pytest.raises(ValueError, match=DIFFERENCES[what]):
        train(optimizer, range(5, 9))


def test_what_a_parameter_overrides_on_one_rank_ends_the_next_epoch(
    comm: CommunicatorBase,
) -> None:
    optimizer = multi_node(comm)
    train(optimizer, range(3))
    if comm.rank == 2:
        optimizer.target.b.W.update_rule.hyperparam.alpha = 0.5
    optimizer.new_epoch()
    expected = "alpha of parameter /b/W differs.*: none on rank 0, none on rank 1, 0.5 on rank 2"
    with pytest.raises(ValueError, match=expected):
        train(optimizer, range(3, 4))


@pytest.mark.parametrize("what", ["hook", "rate", "frozen"])
def test_settings_that_do_not_follow_end_the_first_update(
    comm: CommunicatorBase, what: str
) -> None:
    optimizer = multi_node(comm)
    optimizer.add_hook(optimizer_hooks.Lasso(0.25))
    if comm.rank == 1:
        differently(optimizer, what)
    with pytest.raises(ValueError, match=DIFFERENCES[what]):
        train(optimizer, range(1))


def test_a_hook_that_only_reads_may_be_on_one_rank(comm: CommunicatorBase) -> None:
    optimizer, seen = multi_node(comm), []
    if comm.rank == 0:
        optimizer.add_hook(lambda optimizer: seen.append(optimizer.t), "log")
    train(optimizer, range(4))
    assert seen == [0, 1, 2] * (comm.rank == 0)
    assert_same_everywhere(comm, everything(optimizer))


def test_hyperparameters_that_are_arrays(comm: CommunicatorBase) -> None:
    optimizer = multi_node(comm, actual=optimizers.SGD(np.array(0.1 * (comm.rank + 1))))
    train(optimizer, range(2))
    assert optimizer.lr == 0.1
    if comm.rank == 1:
        optimizer.lr = np.array(0.5)
    with pytest.raises(ValueError, match=r"lr differs.*: 0.1 on rank 0, 0.5 on rank 1, 0.1 on"):
        train(optimizer, range(2, 3))


def test_equal_seeds_whose_ranks_draw_unequally(comm: CommunicatorBase) -> None:
    np.random.seed(0)
    optimizer = multi_node(comm, actual=optimizers.SGD(0.1))
    optimizer.add_hook(optimizer_hooks.GradientNoise(0.3))
    for step in range(4):
        np.random.normal(size=comm.rank * (step == 2))
        train(optimizer, range(step, step + 1))
    assert_same_everywhere(comm, everything(optimizer))


@pytest.mark.parametrize("where", ["everywhere", "rank 0"])
def test_schedules_and_readers(comm: CommunicatorBase, tmp_path: Path, where: str) -> None:
    actual = optimizers.MomentumSGD(0.1)
    shared = chainermn.create_multi_node_optimizer(actual, comm).setup(SmallJob())
    trainer = make_trainer(shared, tmp_path, 8)
    if comm.rank == 0:
        trainer.extend(extensions.observe_lr(), trigger=(1, "iteration"))
    if where == "everywhere" or comm.rank == 0:
        shift = extensions.ExponentialShift("lr", 0.5)
        trainer.extend(shift, trigger=(3, "iteration"))
    if where == "everywhere":
        trainer.run()
        assert shared.lr == 0.025
    else:
        with pytest.raises(ValueError, match=r"^lr differs.*: 0.05 on rank 0, 0.1 on rank 1"):
            trainer.run()
        assert trainer.updater.iteration == 3


# ---- hooks and update rules that draw ----


class Draw:
    """A hook that adds what it draws to all gradients."""

    name = "Draw"

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __call__(self, optimizer: chainer.Optimizer) -> None:
        for parameter in optimizer.target.params():
            parameter.grad += np.float32(self.draw())


HOOKS: dict[str, Callable[[Any], Any]] = {
    "GradientNoise": lambda optimizer: optimizer.add_hook(optimizer_hooks.GradientNoise(0.3)),
    "of a parameter": lambda optimizer: optimizer.target.b.W.update_rule.add_hook(
        optimizer_hooks.GradientNoise(0.3)
    ),
    "NumPy": lambda optimizer: optimizer.add_hook(Draw(np.random.normal)),
    "Python": lambda optimizer: optimizer.add_hook(Draw(random.random)),
}


@on_two_ranks
@pytest.mark.parametrize(
    ("hook", "mode"), [*((hook, "plain") for hook in HOOKS), *(("NumPy", mode) for mode in MODES)]
)
def test_noise_is_the_same_everywhere_and_leaves_dropout_alone(
    comm: CommunicatorBase, hook: str, mode: str
) -> None:
    optimizer = multi_node(comm, actual=optimizers.SGD(0.1), **MODES[mode])
    HOOKS[hook](optimizer)
    np.random.seed(comm.rank)
    drawn = []

    def loss(x: np.ndarray) -> chainer.Variable:
        drawn.append(np.random.normal())
        return optimizer.target(x)

    for step in range(6):
        optimizer.update(loss, batch(comm.rank, step))
    optimizer.settle()
    assert_same_everywhere(comm, everything(optimizer))
    np.testing.assert_array_equal(drawn, np.random.RandomState(comm.rank).normal(size=6))


def test_equal_seeds_keep_their_bits(comm: CommunicatorBase) -> None:
    with_hook = multi_node(comm, actual=optimizers.SGD(0.1))
    with_hook.add_hook(optimizer_hooks.GradientNoise(0.3))
    by_hand = multi_node(comm, actual=optimizers.SGD(0.1))
    np.random.seed(3)
    for step in range(4):
        np.random.normal()  # what dropout draws
        with_hook.update(with_hook.target, batch(comm.rank, step))
    np.random.seed(3)
    noise = optimizer_hooks.GradientNoise(0.3)
    for step in range(4):
        np.random.normal()
        by_hand.target.cleargrads()
        by_hand.target(batch(comm.rank, step)).backward()
        if step == 0:
            by_hand.update()
            continue
        comm.multi_node_mean_grad(by_hand.target, zero_fill=True)
        for parameter in by_hand.target.params(include_uninit=False):
            noise(parameter.update_rule, parameter)
            parameter.update()
    for name, value in everything(with_hook).items():
        if name.startswith("model/"):
            np.testing.assert_array_equal(everything(by_hand)[name], value, err_msg=name)
