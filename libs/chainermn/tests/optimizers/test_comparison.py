"""Replicas that are compared, and what is said if they differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizers
from chainer.training.extension import PRIORITY_WRITER
from chainer.training.triggers import ManualScheduleTrigger

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.compression import TopK
from chainermn.extensions import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    create_multi_node_checkpointer,
    multi_node_snapshot,
)
from chainermn.optimizers import DoubleBufferingOptimizer, LocalSGD
from chainermn.optimizers.comparison import Difference, find_differences
from libs.chainermn.tests.optimizers.small_job import Network, assert_equal

Change = Callable[[np.ndarray], Any]


def array(change: Change | None = None, dtype: str = "f4") -> Any:
    made = np.array([[3, -4], [1, 2]], dtype)
    if change is not None:
        change(made)
    return made


def put(index: Any, value: Any) -> Change:
    return lambda made: made.__setitem__(index, value)


#: The values on ranks 0, 1 and 2, and the difference.
CASES: dict[str, tuple[list[Any], Difference | None]] = {
    "equal": ([array()] * 3, None),
    "NaN in the same places": ([array(put(0, np.nan))] * 3, None),
    "rank 1": (
        [array(), array(put((1, 0), 2)), array()],
        Difference("it", (1,), ("float32[2, 2]",) * 2, 1.0, 0.25),
    ),
    "ranks 1 and 2, in different ways": (
        [array(), array(put((1, 0), 2)), array(put((1, 1), 4))],
        Difference("it", (1, 2), ("float32[2, 2]",) * 2, 2.0, 0.5),
    ),
    "rank 0 alone": (
        [array(put((1, 1), 8)), array(), array()],
        Difference("it", (0,), ("float32[2, 2]",) * 2, 6.0, 0.75),
    ),
    "NaN": (
        [array(), array(), array(put((0, 0), np.nan))],
        Difference("it", (2,), ("float32[2, 2]",) * 2, np.inf, np.inf),
    ),
    "beside infinity": (
        [
            array(put((0, 0), np.inf)),
            array(lambda made: put((0, 0), np.inf)(made) or put((1, 0), 3)(made)),
            array(put((0, 0), np.inf)),
        ],
        Difference("it", (1,), ("float32[2, 2]",) * 2, 2.0, 0.5),
    ),
    "zeros on rank 0": (
        [array() * 0, array() * 0, array()],
        Difference("it", (2,), ("float32[2, 2]",) * 2, 4.0, np.inf),
    ),
    "rounding": (
        [array(), array(put((0, 0), np.float32(3) + np.float32(2**-18))), array()],
        Difference("it", (1,), ("float32[2, 2]",) * 2, 2.0**-18, 2.0**-20, True),
    ),
    "as much in float64": (
        [array(dtype="f8"), array(put((0, 0), 3 + 2.0**-18), "f8"), array(dtype="f8")],
        Difference("it", (1,), ("float64[2, 2]",) * 2, 2.0**-18, 2.0**-20),
    ),
    "integers": (
        [array(dtype="i4"), array(dtype="i4"), array(put((0, 0), 4), "i4")],
        Difference("it", (2,), ("int32[2, 2]",) * 2, 1.0, 0.25),
    ),
    "shapes": (
        [array(), array()[0], array()],
        Difference("it", (1,), ("float32[2, 2]", "float32[2]")),
    ),
    "dtypes": (
        [array(), array(), array(dtype="f8")],
        Difference("it", (2,), ("float32[2, 2]", "float64[2, 2]")),
    ),
    "numbers": ([3, 4, 3], Difference("it", (1,), ("3", "4"))),
    "missing": ([array(), None, array()], Difference("it", (1,), ("float32[2, 2]", "missing"))),
    "not on rank 0": ([None, 3, 3], Difference("it", (0,), ("missing", "3"))),
}


@pytest.mark.mpi(3)
@pytest.mark.parametrize("case", CASES)
def test_differences(comm: CommunicatorBase, case: str) -> None:
    values, difference = CASES[case]
    own = values[comm.rank]
    values_of_rank = {"same": np.arange(3), "last": None}
    if own is not None:
        values_of_rank["it"] = own
    found = find_differences(comm, values_of_rank)
    assert found == [difference] * (difference is not None)


def model_with(width: int = 2) -> chainer.Link:
    with chainer.using_config("dtype", np.float32):
        return chainer.Sequential(L.Linear(2, width, initialW=1), L.Linear(width, 1, initialW=2))


def train(optimizer: Any, n_updates: int) -> None:
    model = optimizer.target
    x = np.full((1, 2), 0.125 * (1 + optimizer.communicator.rank), "f")
    for _ in range(n_updates):
        optimizer.update(lambda: F.sum(model(x)))


def make(comm: CommunicatorBase, actual: Any = None, **settings: Any) -> Any:
    actual = optimizers.Adam() if actual is None else actual
    optimizer = chainermn.create_multi_node_optimizer(actual, comm, **settings)
    return optimizer.setup(model_with())


def add(to: Any, number: float) -> None:
    to[...] += number


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a parameter": (
        lambda optimizer: optimizer.target[0].W.array.fill(8),
        "/0/W differs between rank 0 and rank 1 by up to ",
    ),
    "a state": (
        lambda optimizer: optimizer.target[1].b.update_rule.state["m"].fill(0),
        "m of /1/b differs between rank 0 and rank 1 by up to ",
    ),
    "a count": (
        lambda optimizer: vars(optimizer.target[1].b.update_rule).update(t=9),
        "t of /1/b is 4 on rank 0, but 9 on rank 1; since",
    ),
    "the number of steps": (
        lambda optimizer: setattr(optimizer, "t", 9),
        "t is 4 on rank 0, but 9 on rank 1; since",
    ),
}


@pytest.mark.mpi(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_one_rank(comm: CommunicatorBase, mistake: str) -> None:
    make_it, shown = MISTAKES[mistake]
    optimizer = make(comm)
    optimizer.compare_replicas()  # nothing is equal yet
    train(optimizer, 3)
    optimizer.compare_replicas()
    train(optimizer, 2)
    if comm.rank == 1:
        make_it(optimizer)
    with pytest.raises(ValueError) as raised:
        optimizer.compare_replicas()
    text = str(raised.value)
    assert text.startswith(f"the replicas are no longer equal: {shown}")
    assert "; since iteration 3 at the earliest (optimizer.t is 4 now)." in text
    assert comm.bcast_obj(text) == text


@pytest.mark.mpi(2)
def test_rounding_is_one_warning(comm: CommunicatorBase) -> None:
    optimizer = make(comm)
    train(optimizer, 3)
    weight = optimizer.target[0].W.array
    if comm.rank == 1:
        weight[0, 0] *= 1 + 2.0**-20
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.compare_replicas()
        optimizer.compare_replicas()
    assert [str(each.message).split(" (")[0] for each in caught] == [
        "the replicas differ by rounding: /0/W differs between rank 0 and rank 1 by up to 9.54e-07"
    ] * (comm.rank == 0)
    if comm.rank == 1:
        weight[0, 0] *= 1 + 2.0**-10
    with pytest.raises(ValueError, match=r"are no longer equal: /0/W differs .* iteration 1 at"):
        optimizer.compare_replicas()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("settings", ["raise", "warn", "ignore", "never"])
def test_what_happens_then(comm: CommunicatorBase, settings: str) -> None:
    how = {"compare_every": 0} if settings == "never" else {"on_difference": settings}
    optimizer = make(comm, optimizers.SGD(0.5), **how)
    train(optimizer, 2)
    for parameter in optimizer.target.params():
        parameter.array += comm.rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raised = ""
        try:
            optimizer.compare_replicas()
        except ValueError as error:
            raised = str(error)
    found = [str(each.message) for each in caught] + [raised] * bool(raised)
    expected = {"raise": 1, "warn": int(comm.rank == 0)}.get(settings, 0)
    assert len(found) == expected
    sizes = "differs between rank 0 and rank 1 by up to 1 ("
    for text in found:
        assert text.count(sizes) == 3
        assert f"/0/W {sizes}" in text
        assert "; and 1 more part; since iteration 1 at the earliest" in text


@pytest.mark.mpi(2)
def test_dummy_is_not_compared() -> None:
    optimizer = make(chainermn.create_communicator("dummy"), optimizers.SGD(0.5))
    train(optimizer, 3)
    optimizer.compare_replicas()
    weights = optimizer.communicator.allgather_obj(optimizer.target[0].W.array)
    assert not np.array_equal(*weights)


def test_wrong_settings(comm: CommunicatorBase) -> None:
    with pytest.raises(ValueError, match="got 'stop'"):
        make(comm, on_difference="stop")
    with pytest.raises(ValueError, match=r"compare_every must be .* got -1"):
        make(comm, compare_every=-1)


@pytest.mark.mpi(2)
def test_ranks_that_give_different_settings(comm: CommunicatorBase) -> None:
    optimizer = make(comm, compare_every=2 * comm.rank)
    message = "rank 0: .*compare_every=0, on_difference='raise'; rank 1: .*compare_every=2"
    with pytest.raises(ValueError, match=message):
        train(optimizer, 1)


# ---- in a trainer ----

EPOCHS, BATCH = 3, 2

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "double buffering": {"double_buffering": True},
    "accumulate": {"accumulate": 4},
    "accumulate and overlap": {"accumulate": 4, "overlap": True},
    "compression": {"compression": TopK(density=0.25, min_size=4)},
    "compression and overlap": {"compression": TopK(density=0.25, min_size=4), "overlap": True},
    "uneven": {"uneven": True},
    "uneven and overlap": {"uneven": True, "overlap": True},
    "keep": {"local": LocalSGD(period=4)},
    "average": {"local": LocalSGD(period=4, states="average")},
    "reset": {"local": LocalSGD(period=4, states="reset")},
    "after a while": {"local": LocalSGD(period=4, start_iteration=20)},
}


class Normalized(Network):
    """A model whose running statistics and random numbers differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope(), chainer.using_config("dtype", np.float64):
            self.norm = L.BatchNormalization(3)

    def forward(self, x: Any, t: Any) -> Any:
        return super().forward(self.norm(x), t)


def make_trainer(comm: Any, out: Path, n_examples: int = 14, **settings: Any) -> Any:
    optimizer = make(comm, optimizers.MomentumSGD(0.05), **settings).setup(Normalized())
    n = n_examples - 4 * (comm.rank == 1 and "uneven" in settings)
    x = np.random.default_rng(comm.rank).normal(size=(n, 3))
    data = chainer.datasets.TupleDataset(x, np.sin(x[:, :2]))
    batches = chainer.iterators.SerialIterator(data, BATCH, shuffle=False)
    updater = chainer.training.StandardUpdater(batches, optimizer)
    return chainer.training.Trainer(updater, (EPOCHS, "epoch"), out=str(out))


def target_of(trainer: Any) -> Any:
    return trainer.updater.get_optimizer("main").target


def run(trainer: Any) -> dict[str, np.ndarray]:
    """Train, and return everything that training leaves."""
    trainer.run(show_loop_exception_msg=False)
    optimizer = trainer.updater.get_optimizer("main")
    if isinstance(optimizer, DoubleBufferingOptimizer):
        optimizer.wait()
    saved = [chainer.serializers.npz.serialize(each) for each in (optimizer.target, optimizer)]
    return {name: np.array(value) for each in saved for name, value in each.items()}


def write_on_rank_1(trainer: Any, comm: Any, change: Callable[[Any], Any], when: Any) -> None:
    """Make a trainer of rank 1 change its model, before all other extensions."""

    def write(trainer: Any) -> None:
        change(target_of(trainer))

    if comm.rank == 1:
        trainer.extend(write, trigger=when, priority=PRIORITY_WRITER + 0.5)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.nightly] * (" and " in mode)) for mode in MODES]
)
def test_modes(comm: CommunicatorBase, mode: str, shared_tmp_path: Path) -> None:
    settings = MODES[mode]
    compared = run(make_trainer(comm, shared_tmp_path, **settings))
    assert_equal(compared, run(make_trainer(comm, shared_tmp_path, compare_every=0, **settings)))
    if mode in ("keep", "average", "reset"):
        return  # each average makes the replicas equal
    trainer = make_trainer(comm, shared_tmp_path, **settings)
    at = ManualScheduleTrigger(1, "epoch")
    write_on_rank_1(trainer, comm, lambda model: add(model.a.b.array, 1), at)
    message = r"equal: /a/b differs between rank 0 and rank 1 by up to 1 \(.* since iteration 1 at"
    with pytest.raises(ValueError, match=message):
        run(trainer)
    assert trainer.updater.epoch == 1


@pytest.mark.mpi(2)
@pytest.mark.parametrize("states", ["keep", "average", "reset"])
def test_local_sgd_compares_after_an_average(comm: CommunicatorBase, states: Any) -> None:
    optimizer = make(comm, local=LocalSGD(period=3, states=states))
    train(optimizer, 3)
    optimizer.target[0].W.array += comm.rank
    optimizer.compare_replicas()
    train(optimizer, 1)
    vars(optimizer.target[0].b.update_rule).update(t=comm.rank)
    optimizer.compare_replicas()
    optimizer.target[0].b.update_rule.state["m"] += comm.rank
    names = "m of /0/b"
    if states == "keep":
        optimizer.compare_replicas()
        optimizer.target[0].b.array += comm.rank
        names = "/0/b"
    with pytest.raises(ValueError, match=f"no longer equal: {names} differs .* iteration 3 at"):
        optimizer.compare_replicas()


@pytest.mark.mpi(2)
def test_epochs_that_end_in_different_iterations(
    comm: CommunicatorBase, shared_tmp_path: Path
) -> None:
    def trained(**settings: Any) -> dict[str, Any]:
        trainer = make_trainer(comm, shared_tmp_path, 14 + 4 * comm.rank, **settings)
        trainer.stop_trigger = ManualScheduleTrigger(30, "iteration")
        return run(trainer)

    assert_equal(trained(), trained(compare_every=0))


@pytest.mark.mpi(2)
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("kind", ["evaluator", "generic", "snapshot", "checkpointer"])
def test_running_statistics(
    comm: CommunicatorBase, averaged: bool, kind: str, shared_tmp_path: Path
) -> None:
    trainer = make_trainer(comm, shared_tmp_path)
    if averaged:
        trainer.extend(AllreducePersistent(target_of(trainer), comm), trigger=(1, "epoch"))
    extend(trainer, comm, kind)
    at = ManualScheduleTrigger(2, "epoch")
    write_on_rank_1(trainer, comm, lambda model: add(model.norm.avg_mean, 8), at)
    if not averaged:
        run(trainer)
        return
    message = r"equal: /norm/avg_mean differs between .* by up to 8 \(.* since iteration 7 at"
    with pytest.raises(ValueError, match=message):
        run(trainer)
    assert trainer.updater.epoch == 2


def extend(trainer: Any, comm: CommunicatorBase, kind: str) -> None:
    """Add an extension before which replicas are compared after each epoch."""
    model, once = target_of(trainer), (1, "epoch")
    examples = [(np.ones(3), np.ones(2))]
    batches = chainer.iterators.SerialIterator(examples, 1, repeat=False)
    if kind == "evaluator":
        evaluator = chainer.training.extensions.Evaluator(batches, model)
        trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm), trigger=once)
    elif kind == "generic":
        trainer.extend(GenericMultiNodeEvaluator(comm, batches, model), trigger=once)
    elif kind == "snapshot":
        snapshot = chainer.training.extensions.snapshot()
        trainer.extend(multi_node_snapshot(comm, snapshot, []), trigger=once)
    else:
        trainer.extend(create_multi_node_checkpointer("checkpoint", comm), trigger=once)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("kinds", "compare_every", "expected"),
    [
        ([], 1, [7, 14]),
        ([], 2, [14]),
        (["evaluator", "generic", "snapshot", "checkpointer"], 2, [7, 14, 21]),
        (["evaluator", "snapshot"], 0, []),
        (["elsewhere"], 1, [7, 14]),
    ],
    ids=str,
)
def test_once_in_an_iteration(
    comm: CommunicatorBase,
    kinds: list[str],
    compare_every: int,
    expected: list[int],
    shared_tmp_path: Path,
) -> None:
    trainer = make_trainer(
        comm, shared_tmp_path, compare_every=compare_every, on_difference="warn"
    )
    for kind in kinds:
        other = comm.split(0, comm.rank) if kind == "elsewhere" else comm
        extend(trainer, other, kind.replace("elsewhere", "evaluator"))
    first = ManualScheduleTrigger(2, "iteration")
    write_on_rank_1(trainer, comm, lambda model: add(model.a.b.array, 1), first)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_: found.append(trainer.updater.iteration)  # type: ignore
        run(trainer)
    # An iteration counts when it is complete.
    assert found == expected * (comm.rank == 0)
