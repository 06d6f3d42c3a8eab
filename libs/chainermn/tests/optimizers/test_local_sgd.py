"""Local SGD: each rank takes its own steps, and parameters are averaged now and then."""

from __future__ import annotations

import functools
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
from chainermn.compression import PowerSGD
from chainermn.gradients.exchange import GradientExchange
from chainermn.optimizers import LocalSGD
from libs.chainermn.tests.optimizers.small_job import (
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

MAKERS: dict[str, Any] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.MomentumSGD(0.1),
    "adam": lambda: optimizers.Adam(0.01),
}


def batch(rank: int, step: int) -> list[np.ndarray]:
    places = np.random.default_rng([rank, step]).integers(0, N_EXAMPLES, 8)
    return [part[places] for part in examples()]


def simulate(maker: str, size: int, steps: int, local: LocalSGD) -> tuple[chainer.Link, list[Any]]:
    """Train all replicas in one process; return the first one and all the optimizers."""
    replicas = [MAKERS[maker]().setup(Network()) for _ in range(size)]
    n_local = 0
    for step in range(steps):
        is_local = step >= local.start_iteration
        for rank, optimizer in enumerate(replicas):
            optimizer.target.cleargrads()
            optimizer.target(*batch(rank, step)).backward()
        if not is_local:
            average(replicas, "grad")
        for optimizer in replicas:
            optimizer.update()
        n_local += is_local
        if is_local and n_local % local.period == 0:
            average(replicas, "array")
            states = [[p.update_rule.state for p in o.target.params()] for o in replicas]
            if local.states == "average":
                for of_all in zip(*states, strict=True):
                    for key in of_all[0]:
                        mean = np.mean([state[key] for state in of_all], axis=0)
                        for state in of_all:
                            state[key][...] = mean
            if local.states == "reset":
                for optimizer in replicas:
                    for parameter in optimizer.target.params():
                        for array in parameter.update_rule.state.values():
                            array[...] = 0
                        parameter.update_rule.t = 0
    return replicas[0].target, replicas


def average(replicas: list[Any], what: str) -> None:
    for of_all in zip(*(sorted(o.target.namedparams()) for o in replicas), strict=True):
        mean = np.mean([getattr(parameter, what) for _, parameter in of_all], axis=0)
        for _, parameter in of_all:
            setattr(parameter, what, mean.copy())


def train(comm: CommunicatorBase, maker: str, local: LocalSGD, steps: int, **settings: Any) -> Any:
    optimizer = chainermn.create_multi_node_optimizer(
        MAKERS[maker](), comm, local=local, **settings
    ).setup(Network())
    optimizer.update(optimizer.target, *batch(comm.rank, 0))  # makes the replicas equal
    for step in range(steps):
        optimizer.update(optimizer.target, *batch(comm.rank, step))
    return optimizer


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("maker", list(MAKERS))
@pytest.mark.parametrize("states", ["keep", "average", "reset"])
@pytest.mark.parametrize("start", [0, 5])
def test_as_in_one_process(comm: CommunicatorBase, maker: str, states: Any, start: int) -> None:
    local = LocalSGD(period=4, start_iteration=start, states=states)
    optimizer = train(comm, maker, local, start + 12)
    expected, _ = simulate(maker, comm.size, start + 12, local)
    assert_close(optimizer.target, expected)
    assert_replicas(comm, optimizer.target)
    assert optimizer.t == start + 12


@pytest.mark.mpi(2, 3)
def test_in_between_each_rank_is_on_its_own(comm: CommunicatorBase) -> None:
    local = LocalSGD(period=4)
    optimizer = train(comm, "sgd", local, 6)
    _, replicas = simulate("sgd", comm.size, 6, local)
    assert_close(optimizer.target, replicas[comm.rank].target)
    assert_replicas(comm, optimizer.target, equal=False)
    optimizer.average()
    average(replicas, "array")
    assert_close(optimizer.target, replicas[0].target)
    assert_replicas(comm, optimizer.target)


@pytest.mark.mpi(2)
def test_exchanges_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = chainermn.create_communicator("naive")
    optimizer = train(comm, "sgd", LocalSGD(period=4), 0)
    calls = []
    mean = GradientExchange.mean
    monkeypatch.setattr(GradientExchange, "mean", lambda *args: calls.append(0) or mean(*args))
    monkeypatch.setattr(GradientExchange, "agree", None)
    monkeypatch.setattr(comm, "allgather_obj", None)
    for step in range(12):
        optimizer.update(optimizer.target, *batch(comm.rank, step))
        assert len(calls) == (step + 1) // 4


@pytest.mark.mpi(2)
@pytest.mark.parametrize("period", [1, 2])
def test_ranks_that_average_different_things(comm: CommunicatorBase, period: int) -> None:
    """One rank averages gradients, the other parameters; with period 2, the second one pauses."""
    optimizer = train(comm, "sgd", LocalSGD(period=period, start_iteration=9), 3)
    optimizer.actual_optimizer.t = 9 * comm.rank
    with pytest.raises(ValueError, match="some ranks average gradients, and others what local"):
        optimizer.update(optimizer.target, *batch(comm.rank, 3))
        optimizer.average()


@pytest.mark.mpi(2)
def test_with_compression(comm: CommunicatorBase) -> None:
    compression = PowerSGD(rank=1, min_ratio=1)
    optimizer = train(comm, "sgd", LocalSGD(period=3), 12, compression=compression)
    assert_replicas(comm, optimizer.target)
    assert optimizer.pending().arrays["/a/W"]["total"].any()


@pytest.mark.mpi(2)
def test_errors_of_gradients_are_not_added_to_parameters(comm: CommunicatorBase) -> None:
    local = LocalSGD(period=2, start_iteration=6)
    compression = PowerSGD(rank=1, min_ratio=1)
    results = []
    for n_steps in (6, 8):
        optimizer = chainermn.create_multi_node_optimizer(
            optimizers.SGD(1e-9), comm, local=local, compression=compression
        ).setup(Network())
        for step in range(n_steps + 1):
            optimizer.update(optimizer.target, *batch(comm.rank, step))
        results.append(values(optimizer.target))
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, atol=1e-7)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("start", [0, 2])
def test_refuses_float16(comm: CommunicatorBase, start: int) -> None:
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(np.ones(2, np.float16))
    local = LocalSGD(start_iteration=start)
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, local=local)
    optimizer.setup(model)
    with pytest.raises(ValueError, match="does not average parameters in float16"):
        for _ in range(4):
            optimizer.update(lambda: F.sum(model.w))


@pytest.mark.mpi(2)
def test_a_rank_that_has_taken_steps_before_local_ones_begin(tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    local = LocalSGD(period=2, start_iteration=2)
    file = tmp_path / "optimizer.npz"
    optimizer = train(comm, "sgd", local, 4)
    chainer.serializers.save_npz(file, optimizer)
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, local=local)
    optimizer.setup(Network())
    if comm.rank == 0:
        chainer.serializers.load_npz(file, optimizer)
    optimizer.update(optimizer.target, *batch(comm.rank, 0))
    assert comm.allgather_obj(optimizer.t) == [4, 4]


@pytest.mark.mpi(2)
def test_gradients_with_a_loop_of_ones_own(comm: CommunicatorBase) -> None:
    local = LocalSGD(period=2, start_iteration=2)
    expected = train(comm, "momentum", local, 6)
    optimizer = chainermn.create_multi_node_optimizer(
        MAKERS["momentum"](), comm, local=local
    ).setup(Network())
    for step in (0, *range(6)):
        optimizer.target.cleargrads()
        optimizer.backward(optimizer.target(*batch(comm.rank, step)))
        optimizer.update()
    assert_close(optimizer.target, expected.target, rtol=0)


@pytest.mark.mpi(2)
def test_parameters_that_appear_later(comm: CommunicatorBase) -> None:
    optimizer = train(comm, "sgd", LocalSGD(period=2), 4)
    model = optimizer.target
    with model.init_scope():
        model.late = chainer.Parameter(np.full((2,), comm.rank + 1.0))
    model.late.update_rule = optimizer.create_update_rule()
    for step in range(8):
        optimizer.update(lambda step=step: model(*batch(comm.rank, step)) + F.sum(model.late**2))
    assert_replicas(comm, model)


@pytest.mark.mpi(1, 2)
def test_copies_go_on_on_their_own() -> None:
    import copy

    comm = chainermn.create_communicator("naive")
    optimizer = train(comm, "momentum", LocalSGD(period=2), 4)
    twin = copy.deepcopy(optimizer)
    assert twin.local == optimizer.local
    for each in (optimizer, twin):
        for step in range(4):
            each.update(each.target, *batch(comm.rank, step))
    assert_close(twin.target, optimizer.target, rtol=0)


@pytest.mark.mpi(2)
def test_a_copy_within_a_period_begins_anew() -> None:
    import copy

    comm = chainermn.create_communicator("naive")
    optimizer = train(comm, "sgd", LocalSGD(period=4), 3)
    twin = copy.deepcopy(optimizer)
    for step in range(5):  # the first makes the replicas equal
        twin.update(twin.target, *batch(comm.rank, step))
    assert_replicas(comm, twin.target)


# ---- in a trainer ----


def trainer_of(
    comm: CommunicatorBase,
    out: Path,
    iterations: int,
    local: LocalSGD,
    n_examples: int = N_EXAMPLES,
    **settings: Any,
) -> chainer.training.Trainer:
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.MomentumSGD(0.05), comm, local=local, **settings
    ).setup(Network())
    return make_trainer(optimizer, out, iterations, n_examples)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("generic", [False, True])
def test_evaluates_averaged_parameters(generic: bool, shared_tmp_path: Path) -> None:
    """Ranks have equal parameters at epoch ends (every 15 iterations) and in evaluations."""
    comm = chainermn.create_communicator("naive")
    trainer = trainer_of(comm, shared_tmp_path, 35, LocalSGD(period=4))
    model: Any = trainer.updater.get_optimizer("main").target
    seen = []

    def look(*args: Any) -> Any:
        assert_replicas(comm, model)
        seen.append(trainer.updater.iteration)
        return model(*args)

    data = chainer.datasets.TupleDataset(*examples())[:2]
    iterator = chainer.iterators.SerialIterator(data, 2, repeat=False, shuffle=False)
    if generic:
        evaluator: Any = chainermn.extensions.GenericMultiNodeEvaluator(comm, iterator, look)
    else:
        evaluator = extensions.Evaluator(iterator, model, eval_func=look)
        evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
    trainer.extend(evaluator, trigger=(7, "iteration"))
    trainer.extend(lambda trainer: assert_replicas(comm, model), name="look", trigger=(1, "epoch"))
    trainer.run()
    assert seen == [7, 14, 21, 28, 35]


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("start", [0, 3, 10])
@pytest.mark.parametrize(
    "compression", [None, PowerSGD(rank=1, min_ratio=1)], ids=["", "compressed"]
)
def test_a_resumed_run_equals_an_unbroken_one(
    comm: CommunicatorBase, start: int, compression: Any, shared_tmp_path: Path
) -> None:
    local = LocalSGD(period=4, start_iteration=start)
    make = functools.partial(trainer_of, comm, local=local, compression=compression)
    unbroken, resumed = resume(make, "checkpointer", comm, shared_tmp_path)
    assert_close(resumed.target, unbroken.target, rtol=0)
    assert resumed.t == unbroken.t


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("states", ["keep", "average", "reset"])
def test_a_snapshot_for_all(comm: CommunicatorBase, states: Any, shared_tmp_path: Path) -> None:
    make = functools.partial(trainer_of, comm, local=LocalSGD(period=4, states=states))
    unbroken, resumed = resume(make, "snapshot", comm, shared_tmp_path)
    assert_close(resumed.target, unbroken.target, rtol=0)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("iterations", "is_lost"), [(7, True), (9, False)])
def test_a_plain_snapshot_of_rank_0(iterations: int, is_lost: bool, shared_tmp_path: Path) -> None:
    """After the first update, parameters are averaged in the 5th, the 9th and so on."""
    comm = chainermn.create_communicator("naive")
    make = functools.partial(trainer_of, comm, local=LocalSGD(period=4))
    optimizer = resume_from_rank_0(make, comm, shared_tmp_path, iterations, is_lost)
    optimizer.settle()
    assert_replicas(comm, optimizer.target)


@pytest.mark.mpi(2)
def test_resumed_with_a_longer_first_phase(comm: CommunicatorBase, shared_tmp_path: Path) -> None:
    """Parameters that have not been averaged are not assumed to be equal."""
    optimizer = train(comm, "sgd", LocalSGD(period=4), 2)
    assert_replicas(comm, optimizer.target, equal=False)
    files = [str(shared_tmp_path / f"{what}.{comm.rank}") for what in ("optimizer", "model")]
    for file, what in zip(files, (optimizer, optimizer.target), strict=True):
        chainer.serializers.save_npz(file, what)
    local = LocalSGD(period=4, start_iteration=50)
    resumed = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, local=local)
    resumed.setup(Network())
    for file, what in zip(files, (resumed, resumed.target), strict=True):
        chainer.serializers.load_npz(file, what)
    for step in range(3):
        resumed.update(resumed.target, *batch(comm.rank, step))
    assert_replicas(comm, resumed.target)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("period", [3, 100])
def test_epochs_that_end_at_different_times(period: int, shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    # 7 and 6 examples: 4 and 3 batches per epoch.
    trainer = trainer_of(comm, shared_tmp_path, 40, LocalSGD(period=period), n_examples=13)
    with pytest.raises(ValueError, match=r"different numbers of steps .*force_equal_length=True"):
        trainer.run(show_loop_exception_msg=False)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"period": 0}, "LocalSGD: period must be an integer of at least 1, got 0"),
        ({"period": 2.5}, "period must be an integer"),
        ({"start_iteration": -1}, "start_iteration must be an integer of at least 0, got -1"),
        ({"states": "drop"}, "states must be 'keep', 'average' or 'reset', got 'drop'"),
    ],
)
def test_wrong_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(**arguments)


@pytest.mark.parametrize(
    "settings", [{"double_buffering": True}, {"overlap": True}, {"accumulate": 2}], ids=str
)
def test_what_does_not_go_together(comm: CommunicatorBase, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exchanges nothing in most steps: leave out"):
        chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, local=LocalSGD(), **settings)


@pytest.mark.mpi(2)
def test_ranks_that_give_different_settings(comm: CommunicatorBase) -> None:
    for start in (0, 5):
        local = LocalSGD(period=4 + comm.rank, start_iteration=start)
        with pytest.raises(ValueError, match=r"rank 0: .*period=4.*; rank 1: .*period=5"):
            train(comm, "sgd", local, 0)
    with pytest.raises(ValueError, match=r"rank 0: .*LocalSGD.*; rank 1: "):
        chainermn.create_multi_node_optimizer(
            optimizers.SGD(), comm, local=None if comm.rank else LocalSGD()
        ).setup(Network()).update(lambda: chainer.Variable(np.zeros(())))
