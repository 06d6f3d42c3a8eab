"""Steps on the mean gradient, against steps taken in one process with all ranks' batches."""

from __future__ import annotations

import copy
import pickle
import threading
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
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import chainermn
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.gradients import background
from chainermn.gradients.exchange import GradientExchange
from chainermn.testing.mpiexec import run_job
from libs.chainermn.tests.optimizers.small_job import assert_close, assert_replicas

pytestmark = pytest.mark.each_mpi

PROPERTY = settings(max_examples=10)
BATCH = 4

Values = dict[str, np.ndarray]


def network(seed: int = 0, lazy: bool = False) -> chainer.Sequential:
    np.random.seed(seed)
    with chainer.using_config("dtype", np.float64):
        return chainer.Sequential(L.Linear(None if lazy else 3, 8), F.tanh, L.Linear(8, 2))


def data(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return generator.normal(size=(BATCH, 3)), generator.normal(size=(BATCH, 2))


def loss(model: chainer.Link, x: np.ndarray, t: np.ndarray) -> chainer.Variable:
    return F.mean_squared_error(model(x), t)


def mean_gradients(model: chainer.Link, size: int, step: int, scale: float | None) -> Values:
    sums: Values = {}
    for rank in range(size):
        model.cleargrads()
        loss(model, *data(rank, step)).backward(loss_scale=scale)
        for name, parameter in model.namedparams():
            sums[name] = sums.get(name, 0) + parameter.grad
    return {name: total / size for name, total in sums.items()}


def simulate(optimizer: chainer.Optimizer, size: int, steps: range, delay: int) -> None:
    """Take steps in one process, on mean gradients ``delay`` iterations old."""
    pending = []
    for step in steps:
        scale = optimizer._loss_scale
        pending.append(mean_gradients(optimizer.target, size, step, scale))
        if len(pending) > delay:
            means = pending.pop(0)
            for name, parameter in optimizer.target.namedparams():
                parameter.grad = means[name]
            optimizer.update()


MAKERS: dict[str, Callable[[], chainer.Optimizer]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.MomentumSGD(0.1),
    "adam": lambda: optimizers.Adam(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
}


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("double_buffering", [False, True])
@PROPERTY
@given(
    maker=st.sampled_from(sorted(MAKERS)),
    decay=st.booleans(),
    clip=st.booleans(),
    scale=st.sampled_from([None, 8.0]),
    cleargrads=st.booleans(),
)
def test_training_equals_a_simulation(
    double_buffering: bool,
    maker: str,
    decay: bool,
    clip: bool,
    scale: float | None,
    cleargrads: bool,
) -> None:
    comm = chainermn.create_communicator("naive")
    reference = MAKERS[maker]().setup(network(0))
    shared = chainermn.create_multi_node_optimizer(MAKERS[maker](), comm, double_buffering)
    shared.setup(network(comm.rank))
    for optimizer in (reference, shared):
        if decay:
            optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
        if clip:
            optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.5 * (scale or 1)))
        if scale:
            optimizer.set_loss_scale(scale)
    if not cleargrads:
        with pytest.warns(DeprecationWarning, match="use_cleargrads"):
            shared.use_cleargrads(False)
    with warnings.catch_warnings(record=True) as zeroed:
        warnings.filterwarnings("always", ".*zerograd", DeprecationWarning)
        shared.update(loss, shared.target, *data(comm.rank, 0))  # only synchronizes
        for step in range(1, 9):
            shared.update(loss, shared.target, *data(comm.rank, step))
    assert bool(zeroed) is not cleargrads
    simulate(reference, comm.size, range(1, 9), int(double_buffering))
    assert shared.t == reference.t == 8 - double_buffering
    assert_close(shared.target, reference.target)
    if double_buffering:
        shared.wait()


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_update_without_a_loss_function(comm: Any, double_buffering: bool) -> None:
    reference = optimizers.Adam().setup(network(0))
    shared = chainermn.create_multi_node_optimizer(optimizers.Adam(), comm, double_buffering)
    model = network(comm.rank)
    assert shared.setup(model) is shared
    for step in range(6):
        model.cleargrads()
        loss(model, *data(comm.rank, step)).backward()
        shared.update()
    simulate(reference, comm.size, range(1, 6), int(double_buffering))
    assert_close(model, reference.target)


@pytest.mark.mpi(3)
def test_hooks_are_called_once_with_the_mean_gradient(comm: Any) -> None:
    calls = []

    def before(optimizer: chainer.Optimizer) -> None:
        calls.append(("pre", float(optimizer.target.W.grad[0, 0])))

    def after(optimizer: chainer.Optimizer) -> None:
        calls.append(("post", float(optimizer.target.W.grad[0, 0])))

    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(), comm)
    shared.setup(L.Linear(1, 1))
    shared.add_hook(before, "before", timing="pre")
    shared.add_hook(after, "after", timing="post")
    for _ in range(2):
        for parameter in shared.target.params():
            parameter.grad = np.full_like(parameter.array, comm.rank)
        shared.update()
    mean = (comm.size - 1) / 2
    assert calls == [("pre", mean), ("post", mean)]
    shared.remove_hook("before")
    shared.update()
    assert len(calls) == 3


@pytest.mark.mpi(1, 3)
def test_gradients_keep_their_loss_scale_while_they_wait(comm: Any) -> None:
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, True)
    shared.setup(L.Linear(2, 2, nobias=True))
    shared.loss_scaling()
    shared.update()
    shared.actual_optimizer._loss_scale = 16.0
    before = np.array(shared.target.W.array)

    def step(gradient: float) -> None:
        parameter = shared.target.W
        parameter.grad = np.full((2, 2), gradient * shared._loss_scale, "f")
        parameter._loss_scale = shared._loss_scale
        shared.update()

    step(np.inf if comm.rank == comm.size - 1 else 1)
    with pytest.warns(UserWarning, match="Non finite"):
        step(1)  # with a scale of 16, until the overflow is found
    np.testing.assert_array_equal(shared.target.W.array, before)
    assert shared._loss_scale == 8
    step(1)
    np.testing.assert_allclose(shared.target.W.array, before - 1, rtol=1e-6)


@pytest.mark.mpi(1, 3)
def test_overflow_halves_the_loss_scale_on_all(comm: Any) -> None:
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm)
    shared.setup(L.Linear(2, 2, nobias=True))
    shared.loss_scaling()
    shared.update()
    shared.actual_optimizer._loss_scale = 16.0
    before = np.array(shared.target.W.array)
    value = np.nan if comm.rank == comm.size - 1 else 1
    shared.target.W.grad = np.full((2, 2), value, "f")
    with pytest.warns(UserWarning, match="Non finite"):
        shared.update()
    np.testing.assert_array_equal(shared.target.W.array, before)
    assert comm.allgather_obj(shared._loss_scale) == [8.0] * comm.size


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_parameters_initialized_later(comm: Any, double_buffering: bool) -> None:
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, double_buffering)
    shared.setup(network(comm.rank, lazy=True))
    shared.target.cleargrads()
    shared.update()
    assert shared.target[0].W.array is None
    if comm.rank == 0:
        shared.target(data(0, 0)[0])
    shared.update(loss, shared.target, *data(comm.rank, 0))
    assert_replicas(comm, shared.target)
    assert shared.t == 0
    reference = optimizers.SGD(0.1).setup(shared.target.copy("copy"))
    for step in range(1, 5):
        shared.update(loss, shared.target, *data(comm.rank, step))
    simulate(reference, comm.size, range(1, 5), int(double_buffering))
    assert_close(shared.target, reference.target)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("n_set_up", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"double_buffering": True},
        {"overlap": True},
        {"accumulate": 2},
        {"uneven": True},
        {"local": chainermn.optimizers.LocalSGD(period=2)},
    ],
    ids=str,
)
def test_forgotten_setup_raises_on_all_ranks(
    comm: Any, options: dict[str, Any], n_set_up: int
) -> None:
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, **options)
    model = network()
    if comm.rank < n_set_up:
        optimizer.setup(model)
    message = rf"rank {n_set_up}: the optimizer has no model: call optimizer\.setup\(model\)"
    with pytest.raises(RuntimeError, match=message):
        optimizer.update(loss, model, *data(comm.rank, 0))


@pytest.mark.mpi(1, 2)
def test_trainer_of_an_optimizer_without_a_model(comm: Any) -> None:
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(), comm)
    iterator = chainer.iterators.SerialIterator([1], 1)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    with pytest.raises(AttributeError, match=rf"^rank {comm.rank}: the optimizer has no model"):
        chainer.training.Trainer(updater)
    assert getattr(optimizer, "target", None) is None


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_another_target_is_synchronized(comm: Any, double_buffering: bool) -> None:
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, double_buffering)
    for setup in (shared.setup, shared.actual_optimizer.setup):
        setup(network(comm.rank))
        for step in range(3):
            shared.update(loss, shared.target, *data(comm.rank, step))
        assert shared.t == 2 - double_buffering
        reference = optimizers.SGD(0.1).setup(network(0))
        simulate(reference, comm.size, range(1, 3), int(double_buffering))
        assert_close(shared.target, reference.target)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_another_parameter_of_the_same_name_is_synchronized(double_buffering: bool) -> None:
    comm = chainermn.create_communicator("naive")
    model: Any = L.Linear(2, 2, nobias=True)
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, double_buffering)
    shared.setup(model)
    for value in (1, 2):
        with model.init_scope():
            model.W = chainer.Parameter(np.full((2, 2), value + comm.rank, "f"))
        model.W.update_rule = shared.create_update_rule()
        for _ in range(2):
            model.W.grad = np.zeros((2, 2), "f")
            shared.update()
        np.testing.assert_array_equal(model.W.array, np.full((2, 2), value))


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("loading", ["all", "root"])
def test_first_update_after_loading_a_snapshot(loading: str, shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    before = chainermn.create_multi_node_optimizer(optimizers.Adam(0.1), comm).setup(network(0))
    for step in range(3):
        before.update(loss, before.target, *data(comm.rank, step))
    if comm.rank == 0:
        chainer.serializers.save_npz(shared_tmp_path / "optimizer.npz", before)
        chainer.serializers.save_npz(shared_tmp_path / "model.npz", before.target)
    comm.mpi_comm.Barrier()

    after = chainermn.create_multi_node_optimizer(optimizers.Adam(0.1), comm).setup(network(1))
    if loading == "all" or comm.rank == 0:
        chainer.serializers.load_npz(shared_tmp_path / "optimizer.npz", after)
        chainer.serializers.load_npz(shared_tmp_path / "model.npz", after.target)
    after.update(loss, after.target, *data(comm.rank, 3))
    if loading == "all" or comm.size == 1:  # all are equal: no step is lost
        before.update(loss, before.target, *data(comm.rank, 3))
    assert_close(after.target, before.target, rtol=0)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_zero_fill(comm: Any, double_buffering: bool) -> None:
    for zero_fill in (True, False):
        shared = chainermn.create_multi_node_optimizer(
            optimizers.SGD(1), comm, double_buffering, zero_fill
        )
        model = L.Linear(1, 1, nobias=True, initialW=0)
        shared.setup(model)
        shared.update()

        def update(shared: Any = shared, model: Any = model) -> None:
            for _ in range(1 + double_buffering):
                model.W.grad = np.ones((1, 1), "f") if comm.rank == 0 else None
                shared.update()

        if zero_fill:
            update()
            np.testing.assert_allclose(model.W.array, -1 / comm.size, rtol=1e-6)
        else:
            with pytest.raises(ValueError, match="no gradient on rank"):
                update()


@pytest.mark.mpi(3)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_models_that_differ(comm: Any, double_buffering: bool) -> None:
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, double_buffering)
    shared.setup(L.Linear(2 + (comm.rank == 1), 2))
    with pytest.raises(ValueError, match="first difference is rank 0"):
        shared.update()


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_snapshot_is_that_of_the_actual_optimizer(double_buffering: bool, tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    shared = chainermn.create_multi_node_optimizer(optimizers.Adam(), comm, double_buffering)
    shared.setup(network(0))
    for step in range(4):
        shared.update(loss, shared.target, *data(comm.rank, step))
    chainer.serializers.save_npz(str(tmp_path / "shared"), shared)
    plain = optimizers.Adam().setup(network(0))
    chainer.serializers.load_npz(str(tmp_path / "shared"), plain)
    assert plain.t == shared.t == 3 - double_buffering
    for rule, other in zip(states(plain), states(shared), strict=True):
        np.testing.assert_equal(rule, other)
    chainer.serializers.save_npz(str(tmp_path / "plain"), plain)
    again = chainermn.create_multi_node_optimizer(optimizers.Adam(), comm).setup(network(0))
    chainer.serializers.load_npz(str(tmp_path / "plain"), again)
    assert again.t == plain.t


def states(optimizer: Any) -> list[Any]:
    return [parameter.update_rule.state for parameter in optimizer.target.params()]


@pytest.mark.parametrize("double_buffering", [False, True])
def test_attributes_are_those_of_the_actual_optimizer(comm: Any, double_buffering: bool) -> None:
    actual = optimizers.MomentumSGD(0.5)
    shared = chainermn.create_multi_node_optimizer(actual, comm, double_buffering)
    shared.setup(network())
    shared.lr = 0.25
    shared.custom = "mine"
    shared.use_auto_new_epoch = True
    shared.new_epoch(auto=True)
    assert (actual.lr, actual.custom, actual.epoch, shared.epoch) == (0.25, "mine", 1, 1)
    assert shared.hyperparam is actual.hyperparam
    assert shared.communicator is comm
    assert shared.zero_fill
    with pytest.raises(AttributeError, match="absent"):
        _ = shared.absent


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_copies(comm: Any, double_buffering: bool) -> None:
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, double_buffering)
    shared.setup(network(0))
    shared.update(loss, shared.target, *data(comm.rank, 0))
    shallow, deep = copy.copy(shared), copy.deepcopy(shared)
    assert shallow.actual_optimizer is shared.actual_optimizer
    assert deep.target is not shared.target
    assert deep.communicator is shared.communicator
    for step in range(1, 4):
        deep.update(loss, deep.target, *data(comm.rank, step))
    assert shared.t == 0
    assert deep.t == 3 - double_buffering
    reference = optimizers.SGD(0.1).setup(network(0))
    assert_close(shared.target, reference.target)
    simulate(reference, comm.size, range(1, 4), int(double_buffering))
    assert_close(deep.target, reference.target)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(shared)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_parameter_with_two_names(comm: Any, double_buffering: bool) -> None:
    model = chainer.Chain()
    with model.init_scope():
        model.a = chainer.Parameter(np.zeros(2))
        model.b = model.a
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, double_buffering)
    shared.setup(model)
    for _ in range(2 + double_buffering):
        model.a.grad = np.full(2, comm.rank + 1.0)
        shared.update()
    once = comm.allreduce(np.array(comm.rank + 1.0), "mean")
    # Chainer, too, takes one step per name.
    np.testing.assert_allclose(model.a.array, [-2 * once, -2 * once])


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("overlap", [False, True])
def test_one_small_allreduce_for_each_step(overlap: bool) -> None:
    class Counting(MPI.Intracomm):
        """A communicator that counts calls for agreement; gradients travel in other ways."""

        n_calls = 0

        def Allreduce(self, *args: Any) -> None:
            Counting.n_calls += 1
            super().Allreduce(*args)

        def Iallreduce(self, *args: Any) -> Any:
            Counting.n_calls += 1
            return super().Iallreduce(*args)

        def allgather(self, *args: Any) -> Any:
            Counting.n_calls += 1
            return super().allgather(*args)

    world = Counting(MPI.COMM_WORLD)
    comm = NaiveCommunicator(world)
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, overlap=overlap)
    shared.setup(network(comm.rank))
    for step in range(4):  # in which the ranks synchronize, and agree on an order
        shared.update(loss, shared.target, *data(comm.rank, step))
    Counting.n_calls = 0
    for step in range(3):
        shared.update(loss, shared.target, *data(comm.rank, step))
    assert Counting.n_calls == 3


@pytest.mark.mpi(1, 2)
def test_double_buffering_runs_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = chainermn.create_communicator("naive")
    released, threads = threading.Event(), []
    mean = GradientExchange.mean

    def slow_mean(*args: Any) -> Any:
        assert released.wait(20)
        threads.append(threading.current_thread())
        return mean(*args)

    monkeypatch.setattr(GradientExchange, "mean", slow_mean)
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, True)
    model = L.Linear(1, 1, nobias=True, initialW=0)
    shared.setup(model)
    shared.update()
    model.W.grad = np.ones((1, 1), "f")
    shared.update()
    model.cleargrads()
    assert threads == []
    released.set()
    shared.wait()
    assert threads != [threading.main_thread()]
    shared.update()
    assert model.W.array == -1


@pytest.mark.mpi(1, 2)
def test_double_buffering_without_thread_support(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = chainermn.create_communicator("naive")
    monkeypatch.setattr(background, "thread_support", lambda n_hosts: "serialized")
    threads = set(threading.enumerate())
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, True)
    shared.setup(network(comm.rank))
    for step in range(5):
        shared.update(loss, shared.target, *data(comm.rank, step))
    reference = optimizers.SGD(0.1).setup(network(0))
    simulate(reference, comm.size, range(1, 5), 1)
    assert_close(shared.target, reference.target)
    assert threads.issuperset(threading.enumerate())


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_in_a_trainer(comm: Any, double_buffering: bool, tmp_path: Path) -> None:
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, double_buffering)
    model = L.Classifier(network(comm.rank), lossfun=F.mean_squared_error)
    model.compute_accuracy = False
    shared.setup(model)
    x, t = data(comm.rank, 0)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(x, t), 2, shuffle=False
    )
    updater = chainer.training.StandardUpdater(iterator, shared, loss_scale=2.0)
    trainer = chainer.training.Trainer(updater, (4, "epoch"), out=str(tmp_path))
    trainer.extend(chainer.training.extensions.ExponentialShift("lr", 0.5), trigger=(1, "epoch"))
    trainer.run()
    assert shared.lr == 0.1 * 0.5**4
    assert shared.epoch == 4
    assert_replicas(comm, model)


def test_job_that_ends_while_exchanges_are_running() -> None:
    script = Path(__file__).parent / "end_while_exchanging.py"
    result = run_job(2, [script])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2
    failed = run_job(2, [script, "raise"])
    assert not failed.timed_out
    assert failed.returncode != 0
    assert "by design" in failed.stderr


@pytest.mark.mpi(1, 2)
def test_own_attributes_can_be_set(comm: Any) -> None:
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm)
    shared.zero_fill = False
    shared.lr = 0.5
    assert shared.zero_fill is False
    assert shared.actual_optimizer.lr == 0.5


@pytest.mark.mpi(1, 3)
def test_double_buffering_forgets_gradients_from_before_a_snapshot(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, True)
    model = L.Linear(1, 1, nobias=True, initialW=0)
    shared.setup(model)

    def update(grad: float) -> float:
        model.W.grad = np.full((1, 1), grad, "f")
        shared.update()
        return float(model.W.array[0, 0])

    assert [update(g) for g in (0, 1, 10)] == [0, 0, -1]
    if comm.rank == 0:
        chainer.serializers.save_npz(shared_tmp_path / "optimizer.npz", shared)
        chainer.serializers.save_npz(shared_tmp_path / "model.npz", model)
    comm.mpi_comm.Barrier()
    assert [update(g) for g in (100, 1000)] == [-11, -111]
    chainer.serializers.load_npz(shared_tmp_path / "optimizer.npz", shared)
    chainer.serializers.load_npz(shared_tmp_path / "model.npz", model)
    assert [update(g) for g in (5, 7)] == [-1, -6]


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_debug_mode_holds_in_the_exchange(comm: Any, double_buffering: bool) -> None:
    shared = chainermn.create_multi_node_optimizer(optimizers.SGD(1), comm, double_buffering)
    model = L.Linear(1, 1, nobias=True, initialW=0)
    shared.setup(model)
    with chainer.using_config("debug", True), pytest.raises(ValueError, match="NaN or infinite"):
        for _ in range(3):
            model.W.grad = np.full((1, 1), np.nan, "f")
            shared.update()
