"""Compressed gradients, with everything that optimizers, snapshots and communicators do."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizers
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.compression import Compression, PowerSGD, Quantization, TopK
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn.transport.topology import Topology
from libs.chainermn.tests.optimizers.small_job import assert_equal, assert_replicas, extend, values

STEPS = 6
POWER_SGD = PowerSGD(rank=2, min_ratio=1)
TOP_K = TopK(density=0.1, min_size=12)
QUANTIZATION = Quantization(block=16, min_size=12)
EVERY = pytest.mark.parametrize(
    "compression", [POWER_SGD, TOP_K, QUANTIZATION], ids=lambda c: type(c).__name__
)


class Network(chainer.Chain):
    def __init__(self, width: int | None = 8) -> None:
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.a = L.Linear(width, 12)
            self.b = L.Linear(12, 4)

    def forward(self, x: Any) -> Any:
        return self.b(F.tanh(self.a(x)))


def loss(net: Any, comm: CommunicatorBase, step: int) -> chainer.Variable:
    x = np.random.default_rng([comm.rank, step]).normal(size=(8, 8)).astype(np.float32)
    return F.mean((net(x) - np.sin(x[:, :4])) ** 2)


def make(
    comm: CommunicatorBase, compression: Compression | None, actual: Any = None, **kwds: Any
) -> tuple[Any, MultiNodeOptimizer]:
    net = Network()
    optimizer = chainermn.create_multi_node_optimizer(
        actual or optimizers.SGD(0.5), comm, compression=compression, **kwds
    ).setup(net)
    net.cleargrads()
    optimizer.update()  # makes the replicas equal
    return net, optimizer


def train(optimizer: MultiNodeOptimizer, comm: CommunicatorBase, steps: Any = STEPS) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.update(lambda step=step: loss(optimizer.target, comm, step))


def left_by(optimizer: MultiNodeOptimizer) -> dict[str, np.ndarray]:
    return {
        f"{name} {key}": np.array(array)
        for name, arrays in optimizer.pending().arrays.items()
        for key, array in arrays.items()
    }


# ---- the means ----


@pytest.mark.mpi(1, 2, 3, 4)
@EVERY
def test_every_communicator(compression: Compression, mpi_ranks: int) -> None:
    results = []
    for name in sorted(set(registered()) - {"dummy", "pure_nccl"}):
        hosts = ("ab" * mpi_ranks)[:mpi_ranks]
        if registered()[name].why_not(Topology.from_hosts(hosts, 0)):
            hosts = "a" * mpi_ranks
        place = Topology.from_hosts(hosts, MPI.COMM_WORLD.rank)
        comm = registered()[name](MPI.COMM_WORLD, topology=place)
        net, optimizer = make(comm, compression)
        train(optimizer, comm)
        assert_replicas(comm, net)
        results.append(values(net))
        comm.finalize()
    for result in results[1:]:
        for name, value in result.items():
            np.testing.assert_allclose(value, results[0][name], rtol=1e-4, atol=1e-5)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_factors_in_half_the_bytes(dtype: str) -> None:
    place = Topology.from_hosts("ab", MPI.COMM_WORLD.rank)
    comm = NaiveCommunicator(MPI.COMM_WORLD, topology=place, allreduce_grad_dtype=dtype)
    net, optimizer = make(comm, POWER_SGD, overlap=True)
    train(optimizer, comm)
    assert_replicas(comm, net)
    exact, optimizer = make(chainermn.create_communicator("naive"), POWER_SGD)
    train(optimizer, comm)
    rounding = 2.0 ** (-8 if dtype == "float16" else -5)
    for name, value in values(exact).items():
        np.testing.assert_allclose(values(net)[name], value, rtol=rounding, atol=rounding)
        assert name.endswith("b") or not np.array_equal(values(net)[name], value)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("overlap", [False, True])
def test_starts_later(comm: CommunicatorBase, overlap: bool) -> None:
    plain, optimizer = make(comm, None)
    train(optimizer, comm, 3)
    net, optimizer = make(comm, PowerSGD(rank=1, min_ratio=1, start_iteration=3), overlap=overlap)
    train(optimizer, comm, 3)
    assert_equal(values(net), values(plain))
    assert not optimizer.pending().arrays
    train(optimizer, comm, [3])
    assert left_by(optimizer)["/a/W total"].any()
    assert_replicas(comm, net)


@pytest.mark.mpi(1, 2)
def test_small_gradients_are_sent_as_they_are(comm: CommunicatorBase) -> None:
    _, optimizer = make(comm, PowerSGD(rank=2))
    train(optimizer, comm)
    # 12 x 8 numbers would become 40, and 4 x 12 numbers 32.
    assert optimizer.pending().arrays.keys() == {"/a/W"}


@pytest.mark.mpi(2)
@EVERY
def test_hooks_see_the_mean(comm: CommunicatorBase, compression: Compression) -> None:
    net, optimizer = make(comm, compression, optimizers.Adam())
    seen = []

    def look(optimizer: Any) -> None:
        seen.append(net.a.W.grad.copy())

    optimizer.add_hook(look, "look")
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.1))
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.01))
    train(optimizer, comm)
    assert_replicas(comm, net)
    assert len(seen) == STEPS
    assert len(set(comm.allgather_obj(np.array(seen).tobytes()))) == 1


@pytest.mark.mpi(1, 2)
@EVERY
def test_parameters_that_appear_later(comm: CommunicatorBase, compression: Compression) -> None:
    net, optimizer = make(comm, compression)
    train(optimizer, comm, 2)
    before = left_by(optimizer)
    with net.init_scope():
        net.late = L.Linear(4, 6)
    net.late.W.update_rule = optimizer.create_update_rule()
    net.late.b.update_rule = optimizer.create_update_rule()
    optimizer.update(lambda: F.mean(net.late(net(np.ones((1, 8), np.float32)))))  # no step
    assert_equal(left_by(optimizer), before)
    for _ in range(2):
        optimizer.update(lambda: F.mean(net.late(net(np.ones((1, 8), np.float32))) ** 2))
    assert_replicas(comm, net)
    assert {"/a/W", "/late/W"} <= optimizer.pending().arrays.keys()


@pytest.mark.mpi(2)
def test_a_gradient_that_no_rank_has_waits(comm: CommunicatorBase) -> None:
    net, optimizer = make(comm, TOP_K, zero_fill=False)
    train(optimizer, comm, 2)
    before = left_by(optimizer)
    optimizer.update(lambda: F.mean(net.b(np.full((1, 12), comm.rank, np.float32))))
    after = left_by(optimizer)
    np.testing.assert_array_equal(after["/a/W unsent"], before["/a/W unsent"])
    assert not np.array_equal(after["/b/W unsent"], before["/b/W unsent"])


# ---- loss scaling, NaN and infinity ----


@pytest.mark.mpi(1, 2)
@EVERY
@pytest.mark.parametrize("overlap", [False, True])
def test_loss_scaling(comm: CommunicatorBase, compression: Compression, overlap: bool) -> None:
    """Changing the scale to another power of two changes nothing else."""
    plain, optimizer = make(comm, compression)
    train(optimizer, comm)
    net, optimizer = make(comm, compression, overlap=overlap)
    for step in range(STEPS):
        optimizer.loss_scaling(scale=2.0 ** (step % 3))
        train(optimizer, comm, [step])
    for name, value in values(plain).items():
        np.testing.assert_allclose(values(net)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.mpi(1, 2)
@EVERY
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_overflow_on_one_rank_leaves_no_trace(
    comm: CommunicatorBase, compression: Compression, value: float, overlap: bool
) -> None:
    net, optimizer = make(comm, compression, overlap=overlap)
    optimizer.loss_scaling()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(optimizer, comm, 3)
        params, left, scale = values(net), left_by(optimizer), optimizer._loss_scale
        factor = value if comm.rank == comm.size - 1 else 1.0
        optimizer.update(lambda: loss(net, comm, 3) * np.float32(factor))
    assert_equal(values(net), params)
    assert_equal(left_by(optimizer), left)
    assert optimizer._loss_scale < scale
    train(optimizer, comm, [4])
    assert_replicas(comm, net)
    assert all(np.isfinite(array).all() for array in left_by(optimizer).values())


@pytest.mark.mpi(1, 2)
def test_an_overflow_of_what_is_not_compressed_leaves_no_trace_either() -> None:
    comm = chainermn.create_communicator("naive")
    net, optimizer = make(comm, TOP_K)
    optimizer.loss_scaling()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(optimizer, comm, 3)
        left = left_by(optimizer)
        factor = np.float32(np.inf)
        optimizer.update(lambda: loss(net, comm, 3) + F.sum(net.b.b) * factor)
    assert "/b/b unsent" not in left
    assert_equal(left_by(optimizer), left)


@pytest.mark.mpi(2)
def test_a_parameter_that_a_rank_does_not_use_and_another_loss_scale() -> None:
    comm = chainermn.create_communicator("naive")
    results = []
    for overlap in (False, True):
        net, optimizer = make(comm, TOP_K, overlap=overlap)
        for step in range(8):
            optimizer.set_loss_scale(1024.0 if step < 4 else 64.0)
            used = comm.rank == 0 or step < 4
            optimizer.update(
                lambda step=step, used=used, net=net: (
                    loss(net, comm, step) if used else F.sum(net.b.W**2)
                )
            )
        results.append((values(net), left_by(optimizer)))
    assert_equal(results[0][0], results[1][0])
    assert_equal(results[0][1], results[1][1])


# ---- snapshots ----


def trainer_of(
    comm: CommunicatorBase, compression: Compression, out: Path, iterations: int
) -> chainer.training.Trainer:
    x = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
    data = chainer.datasets.TupleDataset(x, np.sin(x[:, :4]))
    np.random.seed(iterations + comm.rank)
    model = L.Classifier(Network(), lossfun=F.mean_squared_error)
    model.compute_accuracy = False
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(0.5), comm, compression=compression
    ).setup(model)
    part = chainermn.scatter_dataset(data, comm)
    iterator = chainer.iterators.SerialIterator(part, 2, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return chainer.training.Trainer(updater, (iterations, "iteration"), out=str(out))


def end_of(trainer: chainer.training.Trainer) -> dict[str, np.ndarray]:
    optimizer: Any = trainer.updater.get_optimizer("main")
    return values(optimizer.target) | left_by(optimizer)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(
    "compression",
    [POWER_SGD, TopK(density=0.1, min_size=12, momentum=0.9, warmup_iterations=7), QUANTIZATION],
    ids=lambda compression: type(compression).__name__,
)
@pytest.mark.parametrize("kind", ["checkpointer", "snapshot"])
def test_a_resumed_run_equals_an_unbroken_one(
    comm: CommunicatorBase, compression: Compression, kind: str, shared_tmp_path: Path
) -> None:
    unbroken = trainer_of(comm, compression, shared_tmp_path / "unbroken", 9)
    unbroken.run()
    first = trainer_of(comm, compression, shared_tmp_path, 5)
    extend(first, comm, kind, 5)
    first.run()
    comm.allgather_obj(None)
    second = trainer_of(comm, compression, shared_tmp_path, 9)
    extend(second, comm, kind, 5)
    second.run()
    assert second.updater.iteration == 9
    assert_equal(end_of(second), end_of(unbroken))


@pytest.mark.mpi(2)
def test_a_snapshot_of_an_optimizer_alone(comm: CommunicatorBase, shared_tmp_path: Path) -> None:
    trainer = trainer_of(comm, POWER_SGD, shared_tmp_path, 5)
    extend(trainer, comm, "object", 5)
    trainer.run()
    comm.allgather_obj(None)
    (file,) = shared_tmp_path.glob("optimizer*")
    with np.load(file) as saved:
        errors = [saved[f"unsent/rank{rank}/predictor/a/W/total"] for rank in range(2)]
    own = trainer.updater.get_optimizer("main").pending().arrays["/predictor/a/W"]["total"]
    np.testing.assert_array_equal(own, errors[comm.rank])
    assert not np.array_equal(*errors)


@pytest.mark.mpi(3)
def test_on_another_number_of_ranks_it_starts_anew_and_says_so(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    part = comm.split(int(comm.rank == 2), comm.rank)
    if comm.rank < 2:
        trainer = trainer_of(part, POWER_SGD, shared_tmp_path, 5)
        extend(trainer, part, "snapshot", 5)
        trainer.run()
    comm.allgather_obj(None)
    trainer = trainer_of(comm, POWER_SGD, shared_tmp_path, 6)
    extend(trainer, comm, "snapshot", 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    messages = [str(each.message) for each in caught if "to be sent" in str(each.message)]
    reason = "the snapshot is from 2 ranks, but there are 3"
    assert [reason in message for message in messages] == [True] * (comm.rank == 0)
    assert_replicas(comm, trainer.updater.get_optimizer("main").target)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("written_with", "loaded_with", "reason"),
    [
        pytest.param(
            *(POWER_SGD, POWER_SGD, "the snapshot lacks what rank 1 had. Write it by"),
            id="a part is lost",
        ),
        pytest.param(POWER_SGD, None, "the snapshot was written with other settings", id="exact"),
        pytest.param(None, POWER_SGD, "", id="nothing is lost"),
        pytest.param(None, None, "", id="exact both times"),
        pytest.param(replace(POWER_SGD, start_iteration=9), None, "", id="before it has begun"),
    ],
)
@pytest.mark.parametrize("format", ["npz", "hdf5"])
def test_a_plain_snapshot_of_rank_0(
    written_with: Any, loaded_with: Any, reason: str, format: str, shared_tmp_path: Path
) -> None:
    save = getattr(chainer.serializers, f"save_{format}")
    load = getattr(chainer.serializers, f"load_{format}")
    comm = chainermn.create_communicator("naive")
    net, optimizer = make(comm, written_with)
    train(optimizer, comm, 3)
    if comm.rank == 0:
        save(str(shared_tmp_path / "optimizer"), optimizer)
        save(str(shared_tmp_path / "net"), net)
    comm.allgather_obj(None)
    net, optimizer = make(comm, loaded_with)
    load(str(shared_tmp_path / "optimizer"), optimizer)
    load(str(shared_tmp_path / "net"), net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, comm, [3])
    expected = [True] * (comm.rank == 0 and reason != "")
    assert [reason in str(each.message) for each in caught] == expected
    assert_replicas(comm, net)
    if loaded_with is not None:
        assert left_by(optimizer)["/a/W total"].any()


@pytest.mark.parametrize("format", ["npz", "hdf5"])
def test_what_one_rank_saves_alone(comm: CommunicatorBase, format: str, tmp_path: Path) -> None:
    _, optimizer = make(comm, POWER_SGD)
    train(optimizer, comm, 3)
    file = str(tmp_path / "optimizer")
    getattr(chainer.serializers, f"save_{format}")(file, optimizer)
    before = left_by(optimizer)
    train(optimizer, comm, 1)
    getattr(chainer.serializers, f"load_{format}")(file, optimizer)
    assert_equal(left_by(optimizer), before)


@pytest.mark.mpi(1, 2)
def test_copies_go_on_on_their_own(comm: CommunicatorBase) -> None:
    net, optimizer = make(comm, TOP_K)
    train(optimizer, comm, 2)
    twin = copy.deepcopy(optimizer)
    assert twin.compression == TOP_K
    assert_equal(left_by(twin), left_by(optimizer))
    before = left_by(twin)
    train(optimizer, comm, [2])
    assert_equal(left_by(twin), before)
    train(twin, comm, [2])
    assert_equal(left_by(twin), left_by(optimizer))
    assert_equal(values(twin.target), values(net))


@pytest.mark.mpi(1, 2)
def test_a_parameter_that_changes_its_shape_begins_anew(shared_tmp_path: Path) -> None:
    comm = chainermn.create_communicator("naive")
    net, optimizer = make(comm, TOP_K)
    train(optimizer, comm, 2)
    file = str(shared_tmp_path / f"optimizer.{comm.rank}")
    chainer.serializers.save_npz(file, optimizer)
    chainer.serializers.load_npz(file, optimizer)
    train(optimizer, comm, [2])
    net.b.W.array = np.ones((6, 12), np.float32)
    net.b.W.cleargrad()
    net.b.b.array = np.ones(6, np.float32)
    net.b.b.cleargrad()
    optimizer.update(lambda: F.mean(net(np.ones((1, 8), np.float32)) ** 2))
    assert optimizer.pending().arrays["/b/W"]["unsent"].size == 72


@pytest.mark.mpi(1, 2)
def test_another_model_begins_anew(comm: CommunicatorBase) -> None:
    _, optimizer = make(comm, TOP_K)
    train(optimizer, comm, 2)
    optimizer.setup(Network())
    assert not optimizer.pending().arrays


# ---- what is refused ----


class _OfAUser(MpiCommunicatorBase):
    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        """Average in a custom way."""


@pytest.mark.parametrize(
    ("actual", "kwds", "error", "message"),
    [
        (
            optimizers.SGD(),
            {"compression": "PowerSGD"},
            TypeError,
            r"expected a compression, such as chainermn.compression.PowerSGD\(rank=4\), got",
        ),
        (
            optimizers.SGD(),
            {"double_buffering": POWER_SGD},
            TypeError,
            r"double_buffering must be True or False, got PowerSGD\(.*compression=\.\.\.",
        ),
        (optimizers.SGD(), {"compression": PowerSGD}, TypeError, "the class PowerSGD, not one of"),
        (
            optimizers.SGD(),
            {"compression": POWER_SGD, "double_buffering": True},
            ValueError,
            "exclude each other",
        ),
        (
            optimizers.MomentumSGD(),
            {"compression": TopK(momentum=0.9)},
            ValueError,
            r"TopK\(momentum=0.9\) and MomentumSGD would both apply momentum",
        ),
    ],
)
def test_what_cannot_be(actual: Any, kwds: Any, error: type[Exception], message: str) -> None:
    comm = chainermn.create_communicator("naive")
    with pytest.raises(error, match=message):
        chainermn.create_multi_node_optimizer(actual, comm, **kwds)


def test_a_communicator_of_a_user_that_averages_itself() -> None:
    with pytest.raises(ValueError, match="_OfAUser does not compress gradients"):
        chainermn.create_multi_node_optimizer(
            optimizers.SGD(), _OfAUser(MPI.COMM_WORLD), compression=POWER_SGD
        )


@pytest.mark.mpi(2)
def test_ranks_that_give_different_settings(comm: CommunicatorBase) -> None:
    for others in (None, PowerSGD(rank=3, min_ratio=1), TOP_K):
        with pytest.raises(ValueError, match=r"rank 0: .*PowerSGD\(.*rank=2.*rank 1: "):
            make(comm, POWER_SGD if comm.rank == 0 else others)


@pytest.mark.mpi(3)
def test_processors_that_round_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = chainermn.create_communicator("naive")
    if comm.rank:
        monkeypatch.setattr(PowerSGD, "arithmetic", lambda self: b"other bits")
    with pytest.raises(ValueError, match=r"ranks 1, 2 have processors .*OPENBLAS_CORETYPE"):
        make(comm, POWER_SGD)
    make(comm, QUANTIZATION)
