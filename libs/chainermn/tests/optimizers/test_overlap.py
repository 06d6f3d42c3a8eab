"""Training with overlap, which gives the same bits as training without it in every case."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
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
from chainermn import spans
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.compression import Compression, PowerSGD, Quantization, TopK
from chainermn.gradients.exchange import GradientExchange
from chainermn.gradients.overlap import exchange as overlapped_exchange
from chainermn.gradients.overlap import plan as rounds
from chainermn.gradients.overlap.exchange import OverlappedExchange
from chainermn.optimizers import overlapping_optimizer
from chainermn.optimizers.double_buffering_optimizer import DoubleBufferingOptimizer
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn.optimizers.overlapping_optimizer import OverlappingOptimizer
from libs.chainermn.tests.optimizers.small_job import assert_close, assert_equal

pytestmark = pytest.mark.each_mpi

STEPS = 5

Step = Callable[[Any, MultiNodeOptimizer, int, int], None]


@pytest.fixture(autouse=True)
def _many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "BUCKET_BYTES", 40)


class Network(chainer.Chain):
    """Three layers and some parameters for special uses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.a = L.Linear(3, 6)
            self.b = L.Linear(6, 6)
            self.c = L.Linear(6, 2)
            self.lazy = L.Linear(None, 2)
            self.offset = chainer.Parameter(np.zeros((1, 1), np.float32))
            self.wide = chainer.Parameter(np.ones(7))
            self.narrow = chainer.Parameter(np.ones(5, np.float16))

    def forward(self, x: Any) -> Any:
        return self.c(F.tanh(self.b(F.tanh(self.a(x)))))


def x(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=(4, 3)).astype(np.float32)


def square(y: chainer.Variable) -> chainer.Variable:
    return F.mean(y**2)


def train(comm: CommunicatorBase, overlap: bool, step: Step, **kwds: Any) -> dict[str, Any]:
    """Return all that training leaves behind, which is the same on all ranks."""
    return train_and_leave(comm, overlap, step, **kwds)[0]


def train_and_leave(
    comm: CommunicatorBase,
    overlap: bool,
    step: Step,
    prepare: Callable[[MultiNodeOptimizer], Any] = lambda optimizer: None,
    make: Callable[[], chainer.Optimizer] = lambda: optimizers.MomentumSGD(0.1),
    zero_fill: bool = True,
    compression: Compression | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all that training leaves behind, and what compression has left on this rank."""
    net = Network(comm.rank)
    optimizer = chainermn.create_multi_node_optimizer(
        make(), comm, zero_fill=zero_fill, overlap=overlap, compression=compression
    )
    assert isinstance(optimizer, OverlappingOptimizer) is overlap
    optimizer.setup(net)
    prepare(optimizer)
    net.cleargrads()
    optimizer.update()  # makes the replicas equal
    for number in range(STEPS):
        step(net, optimizer, comm.rank, number)
    unsent = optimizer.pending().arrays
    result: dict[str, Any] = {"t": optimizer.t, "loss scale": optimizer._loss_scale}
    for name, parameter in net.namedparams():
        result[name] = parameter.array
        result[name + " gradient"] = parameter.grad if parameter.array is not None else None
        for key, value in (parameter.update_rule.state or {}).items():
            result[f"{name} {key}"] = value
    own = {f"{name} {key}": v for name, arrays in unsent.items() for key, v in arrays.items()}
    return result, own


def assert_same_with_overlap(comm: CommunicatorBase, step: Step, **kwds: Any) -> None:
    plain = train(comm, False, step, **kwds)
    overlapped = train(comm, True, step, **kwds)
    assert_equal(overlapped, plain)
    for name, value in overlapped.items():
        assert comm.allgather_obj(np.array_equal(value, comm.bcast_obj(value))), name


# ---- what a user may do in an iteration ----


def by_update(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    optimizer.update(lambda: square(net(x(rank, step))))


def by_hand(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    net.cleargrads()
    square(net(x(rank, step))).backward()
    optimizer.update()


def by_backward(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    net.cleargrads()
    optimizer.backward(square(net(x(rank, step))))
    optimizer.update()


def each_in_another_way(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    [by_update, by_hand, by_backward][(rank + step) % 3](net, optimizer, rank, step)


def shared_weights(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    def loss() -> chainer.Variable:
        h = net.a(x(rank, step))
        for _ in range(3):
            h = F.tanh(net.b(h))
        return square(net.c(h)) + F.sum(net.a.W * net.a.W)

    optimizer.update(loss)


def other_weights_on_each_rank(
    net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int
) -> None:
    def loss() -> chainer.Variable:
        h = net.a(x(rank, step))
        if (rank + step) % 2:
            h = F.tanh(net.b(h))
        return square(net.c(h) if step else h) + (F.sum(net.offset) if rank == 0 else 0)

    optimizer.update(loss)


def other_weights_in_each_step(
    net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int
) -> None:
    h = net.a(x(rank, step))
    optimizer.update(lambda: square(net.c(F.tanh(net.b(h)) if step % 2 else h)))


def accumulated(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    net.cleargrads()
    for part in range(2):
        square(net(x(rank, 100 * part + step))).backward()
    optimizer.backward(square(net(x(rank, 1000 + step))))
    optimizer.update()


def accumulated_with_shared_weights(
    net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int
) -> None:
    def loss(part: int) -> chainer.Variable:
        return square(net.c(net.b(F.tanh(net.b(net.a(x(rank, 10 * part + step)))))))

    net.cleargrads()
    loss(1).backward()
    optimizer.backward(loss(2))
    optimizer.update()


def every_part_by_backward(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    net.cleargrads()
    for part in range(3):  # more often than needed, but still right
        optimizer.backward(square(net(x(rank, 100 * part + step))))
    optimizer.update()


def never_cleared(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    optimizer.backward(square(net(x(rank, step))))
    optimizer.update()


def no_backprop(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    with chainer.no_backprop_mode():
        h = net.b(net.a(x(rank, step)))
    optimizer.update(lambda: square(net.c(h)))


def truncated(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    h = chainer.Variable(np.zeros((4, 6), np.float32))
    for t in range(3):
        h = F.tanh(net.a(x(rank, 10 * step + t)) + net.b(h))
        net.cleargrads()
        loss = square(net.c(h))
        (optimizer.backward if t else chainer.Variable.backward)(loss)
        loss.unchain_backward()
        optimizer.update()


def gradient_penalty(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    def loss() -> chainer.Variable:
        inputs = chainer.Variable(x(rank, step))
        y = square(net(inputs))
        (gx,) = chainer.grad([y], [inputs], enable_double_backprop=True)
        return y + F.sum(gx**2)

    optimizer.update(loss)


def recomputed(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    def loss() -> chainer.Variable:
        h = F.forget(lambda v: F.tanh(net.b(F.tanh(net.a(v)))), chainer.Variable(x(rank, step)))
        # Chainer itself errs on weights used both inside and outside of ``forget``.
        return square(net.c(net.b(h) if step % 2 else h))

    optimizer.update(loss)


class _Nested(chainer.FunctionNode):
    """A function that runs its own backward within backward, as homemade recomputation does."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        with chainer.no_backprop_mode():
            return (self._function(chainer.Variable(inputs[0])).array,)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        inner = chainer.Variable(self.get_retained_inputs()[0].array)
        with chainer.force_backprop_mode():
            y = self._function(inner)
        y.grad = grad_outputs[0].array
        y.backward()
        return (inner.grad_var,)


def nested_backward(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    def loss() -> chainer.Variable:
        inputs = chainer.Variable(x(rank, step))
        (h,) = _Nested(lambda v: F.tanh(net.b(F.tanh(net.a(v))))).apply((inputs,))
        return square(net.c(h))

    optimizer.update(loss)


def special_gradients(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    """Make gradients that share arrays, are read-only views, or differ in axis order or dtype."""

    def loss() -> chainer.Variable:
        w = net.a.W + F.transpose(net.c.W)[:1, :1] + net.b.W[:, :3] + net.offset
        v = F.matmul(x(rank, step), F.transpose(net.a.W + net.b.W[:, :3]))
        mixed = F.sum(net.wide) ** 2 + F.cast(F.sum(net.narrow) ** 2, np.float64)
        spread = F.sum(F.broadcast_to(net.offset, (6, 3)) + net.a.W)
        return square(w) + square(v) + F.cast(mixed, np.float32) + spread

    optimizer.update(loss)


def changed_in_between(net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int) -> None:
    net.cleargrads()
    optimizer.backward(square(net(x(rank, step))))
    if rank == 0 or step % 2:
        net.b.W.grad = net.b.W.grad * 2
    if step == 3:
        net.c.cleargrads()
    optimizer.update()


def passing_through_the_other(
    net: Any, optimizer: MultiNodeOptimizer, rank: int, step: int
) -> None:
    """Let the loss of another optimizer also give gradients to the model, as in a GAN."""
    net.cleargrads()
    optimizer.backward(square(net(x(rank, step))))
    square(net(x(rank, 50 + step))).backward()
    optimizer.update()


CASES = [
    *(by_update, by_hand, by_backward, each_in_another_way, shared_weights),
    *(other_weights_on_each_rank, other_weights_in_each_step, accumulated),
    *(accumulated_with_shared_weights, every_part_by_backward, never_cleared, no_backprop),
    *(truncated, gradient_penalty, recomputed, nested_backward, special_gradients),
    *(changed_in_between, passing_through_the_other),
]

SAMPLE = (by_update, each_in_another_way, other_weights_on_each_rank, every_part_by_backward)
SAMPLE += (truncated, special_gradients, changed_in_between)
AND_AT_NIGHT_THE_OTHERS = [
    pytest.param(step, marks=[] if step in SAMPLE else [pytest.mark.nightly]) for step in CASES
]


@pytest.mark.mpi(2)
@pytest.mark.parametrize("step", CASES)
def test_same_bits_in_every_case(step: Step) -> None:
    assert_same_with_overlap(chainermn.create_communicator("naive"), step)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("step", AND_AT_NIGHT_THE_OTHERS)
@pytest.mark.parametrize(
    "compression",
    [
        PowerSGD(rank=2, min_ratio=1, start_iteration=1),
        TopK(density=0.2, momentum=0.5, min_size=12, warmup_iterations=2),
        Quantization(block=8, min_size=12),
    ],
    ids=lambda compression: type(compression).__name__,
)
def test_same_bits_with_compression(step: Step, compression: Compression) -> None:
    comm = chainermn.create_communicator("naive")
    (plain, left), (overlapped, left_with_overlap) = (
        train_and_leave(
            *(comm, overlap, step), make=lambda: optimizers.SGD(0.1), compression=compression
        )
        for overlap in (False, True)
    )
    assert_equal(overlapped, plain)
    assert_equal(left_with_overlap, left)
    assert any(value.any() for value in left.values())


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize(
    "step", [each_in_another_way, other_weights_on_each_rank, accumulated, nested_backward]
)
def test_same_bits_on_other_numbers_of_ranks(step: Step) -> None:
    assert_same_with_overlap(chainermn.create_communicator("naive"), step)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("step", [by_update, other_weights_in_each_step, no_backprop, accumulated])
def test_without_zero_fill(comm: CommunicatorBase, step: Step) -> None:
    assert_same_with_overlap(comm, step, zero_fill=False, make=lambda: optimizers.SGD(0.1))


@pytest.mark.mpi(2)
def test_without_zero_fill_a_gradient_that_only_some_have_is_an_error() -> None:
    comm = chainermn.create_communicator("naive")
    for used in (0, 1):
        net = Network()
        optimizer = chainermn.create_multi_node_optimizer(
            optimizers.SGD(0.1), comm, zero_fill=False, overlap=True
        ).setup(net)
        net.cleargrads()
        optimizer.update()
        by_update(net, optimizer, comm.rank, 0)
        by_update(net, optimizer, comm.rank, 1)
        with pytest.raises(ValueError, match="no gradient on rank"):
            optimizer.update(
                lambda net=net, used=used: (
                    F.sum(net.a.W) + (F.sum(net.offset) if comm.rank == used else 0)
                )
            )
        by_update(net, optimizer, comm.rank, 2)  # training goes on


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    "make", [optimizers.SGD, optimizers.Adam, lambda: optimizers.RMSprop(0.01, eps=1e-4)]
)
def test_hooks_see_the_mean(comm: CommunicatorBase, make: Callable[[], chainer.Optimizer]) -> None:
    seen: list[list[np.ndarray]] = []

    def look(optimizer: chainer.Optimizer) -> None:
        seen[-1].append(optimizer.target.a.W.grad.copy())
        optimizer.target.b.W.grad *= 0.5

    def prepare(optimizer: MultiNodeOptimizer) -> None:
        seen.append([])
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.2))
        optimizer.add_hook(look, "look", timing="pre")
        optimizer.target.c.disable_update()

    assert_same_with_overlap(comm, by_update, prepare=prepare, make=make)
    np.testing.assert_array_equal(seen[0], seen[1])
    assert len(seen[0]) == STEPS


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("scale", [None, 8.0])
def test_loss_scaling(comm: CommunicatorBase, scale: float | None) -> None:
    def step(net: Any, optimizer: MultiNodeOptimizer, rank: int, number: int) -> None:
        factor = np.inf if number == 2 and rank == comm.size - 1 and scale is None else 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if number % 2:
                optimizer.update(lambda: square(net(x(rank, number))))
            else:
                net.cleargrads()
                optimizer.backward(square(net(x(rank, number))) * factor)
                optimizer.update()

    def prepare(optimizer: MultiNodeOptimizer) -> None:
        # Chainer's check fails on a parameter without a value.
        optimizer.target.lazy(np.zeros((1, 2), np.float32))
        optimizer.loss_scaling(scale=scale)

    assert_same_with_overlap(comm, step, prepare=prepare)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("step", [by_update, special_gradients])
def test_wire_dtypes(dtype: str, step: Step) -> None:
    comm = chainermn.create_communicator("naive", allreduce_grad_dtype=dtype)
    assert_same_with_overlap(comm, step)


@pytest.mark.mpi(2)
def test_wire_dtype_that_changes() -> None:
    def step(net: Any, optimizer: MultiNodeOptimizer, rank: int, number: int) -> None:
        net.cleargrads()
        optimizer.backward(square(net(x(rank, number))))
        if number == 2:
            optimizer.communicator.set_config("allreduce_grad_dtype", "float16")
        optimizer.update()

    plain, overlapped = (
        train(chainermn.create_communicator("naive"), overlap, step) for overlap in (False, True)
    )
    assert_equal(overlapped, plain)


@pytest.mark.mpi(3)
@pytest.mark.parametrize(
    "name", ["flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"]
)
def test_all_algorithms_take_part(name: str) -> None:
    assert_same_with_overlap(chainermn.create_communicator(name), shared_weights)


@pytest.mark.mpi(2)
def test_dummy_takes_part() -> None:
    comm = chainermn.create_communicator("dummy")
    assert_equal(train(comm, True, by_update), train(comm, False, by_update))


@pytest.mark.mpi(2)
def test_lazy_parameters_and_another_target() -> None:
    def step(net: Any, optimizer: MultiNodeOptimizer, rank: int, number: int) -> None:
        if number == 2:
            optimizer.update(lambda: square(net.lazy(net(x(rank, number)))))
        elif number == 4:
            with net.init_scope():
                net.new = chainer.Parameter(np.full(2, rank, np.float32))
            net.new.update_rule = optimizer.create_update_rule()
            optimizer.backward(square(net(x(rank, number)) + net.new))
            optimizer.update()
        by_update(net, optimizer, rank, number)

    comm = chainermn.create_communicator("naive")
    assert_same_with_overlap(comm, step)
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, overlap=True)
    for seed in (1, 2):
        net = Network(seed + comm.rank)
        optimizer.setup(net)
        for number in range(3):
            by_update(net, optimizer, comm.rank, number)
        np.testing.assert_array_equal(net.a.W.array, comm.bcast(net.a.W.array))
        assert optimizer.t == 2


@pytest.mark.mpi(2)
def test_two_optimizers_over_one_graph(comm: CommunicatorBase) -> None:
    def train_gan(overlap: bool) -> list[np.ndarray]:
        generator, critic = Network(0), Network(1)
        both = [
            chainermn.create_multi_node_optimizer(optimizers.Adam(), comm, overlap=overlap).setup(
                net
            )
            for net in (generator, critic)
        ]
        for optimizer in both:
            optimizer.target.cleargrads()
            optimizer.update()
        for step in range(STEPS):
            made = generator(x(comm.rank, step))
            padded = F.concat((made, made[:, :1]))
            score = critic(padded)
            if step % 2:
                both[0].update(lambda score=score: square(score))
                both[1].update(lambda score=score: -F.mean(score))
            else:
                generator.cleargrads()
                critic.cleargrads()
                both[0].backward(square(score))
                both[1].backward(-F.mean(critic(padded.array)))
                both[1].update()
                both[0].update()
        return [p.array for net in (generator, critic) for p in net.params()]

    for one, other in zip(train_gan(True), train_gan(False), strict=True):
        np.testing.assert_array_equal(one, other)


class _Failing(chainer.FunctionNode):
    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        raise ZeroDivisionError("by design")


@pytest.mark.mpi(3)
@pytest.mark.parametrize("where", ["same", "different", "forward on one"])
def test_training_goes_on_after_an_exception(where: str) -> None:
    def step(net: Any, optimizer: MultiNodeOptimizer, rank: int, number: int) -> None:
        place = rank if where == "different" else 1

        def failing() -> chainer.Variable:
            if where == "forward on one" and rank == 0:
                raise ZeroDivisionError
            h = x(rank, number)
            for layer, link in enumerate((net.a, net.b, net.c)):
                h = link(h)
                if layer == place:
                    (h,) = _Failing().apply((h,))
            return square(h)

        if number % 2:
            with pytest.raises(ZeroDivisionError):
                optimizer.update(failing)
            for parameter in (net.a.W, net.b.W, net.c.W):
                assert parameter.creator is None
                assert parameter.grad is None or parameter.grad.flags.writeable
        by_update(net, optimizer, rank, number)

    assert_same_with_overlap(chainermn.create_communicator("naive"), step)


@pytest.mark.mpi(2)
def test_exchange_begins_while_backward_goes_on(comm: CommunicatorBase) -> None:
    arrived: list[bool] = []
    has_mean = threading.Event()

    def listen(span: spans.Span) -> None:
        if span.name == "all-reduce":
            has_mean.set()

    class Probe(chainer.FunctionNode):
        def forward(self, inputs: Any) -> Any:
            return inputs

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            assert has_mean.wait(60)  # for a mean gradient of c; a and b have no gradients yet
            arrived.append(net.a.W.grad is None)
            return grad_outputs

    net = Network()
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, overlap=True)
    optimizer.setup(net)
    for step in range(2):  # which make the replicas equal, and learn the order
        by_update(net, optimizer, comm.rank, step)
    spans.listen(listen)
    try:
        for step in range(3):
            has_mean.clear()
            optimizer.update(
                lambda step=step: square(
                    net.c(Probe().apply((net.b(net.a(x(comm.rank, step))),))[0])
                )
            )
    finally:
        spans.unlisten(listen)
    assert arrived == [True, True, True]


@pytest.mark.mpi(1, 2)
def test_gradients_under_way_cannot_be_written_to(comm: CommunicatorBase) -> None:
    net = Network()
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, overlap=True)
    optimizer.setup(net)
    for step in range(3):
        by_backward(net, optimizer, comm.rank, step)
    net.cleargrads()
    optimizer.backward(square(net(x(comm.rank, 3))))
    with pytest.raises(ValueError, match="read-only"):
        net.a.W.grad *= 2
    optimizer.update()
    net.a.W.grad *= 2


@pytest.mark.mpi(2)
def test_gradients_kept_by_the_user_stay_as_they_are(comm: CommunicatorBase) -> None:
    net = Network()
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, overlap=True)
    optimizer.setup(net)
    kept = []
    for step in range(5):
        by_update(net, optimizer, comm.rank, step)
        kept.append((net.a.W.grad, net.a.W.grad.copy()))
    for gradient, copy in kept:
        np.testing.assert_array_equal(gradient, copy)


@pytest.mark.mpi(3)
def test_resumed_training_is_the_same(comm: CommunicatorBase, shared_tmp_path: Path) -> None:
    def create() -> MultiNodeOptimizer:
        net = Network()
        net.lazy(np.zeros((1, 2), np.float32))
        optimizer = chainermn.create_multi_node_optimizer(optimizers.Adam(), comm, overlap=True)
        return optimizer.setup(net)

    whole = create()
    for step in range(4):
        by_update(whole.target, whole, comm.rank, step)
    if comm.rank == 0:
        chainer.serializers.save_npz(shared_tmp_path / "optimizer.npz", whole)
        chainer.serializers.save_npz(shared_tmp_path / "model.npz", whole.target)
    comm.mpi_comm.Barrier()
    resumed = create()
    chainer.serializers.load_npz(shared_tmp_path / "optimizer.npz", resumed)
    chainer.serializers.load_npz(shared_tmp_path / "model.npz", resumed.target)
    for step in range(4, 8):
        for optimizer in (whole, resumed):
            by_update(optimizer.target, optimizer, comm.rank, step)
    assert_close(resumed.target, whole.target, rtol=0)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("kind", ["standard", "parallel"])
def test_in_a_trainer(comm: CommunicatorBase, kind: str, tmp_path: Path) -> None:
    class TwoModels(chainer.training.StandardUpdater):
        """An updater that adds up two replicas' gradients, as Chainer's ParallelUpdater does."""

        def update_core(self) -> None:
            optimizer = self.get_optimizer("main")
            net, batch = optimizer.target, np.array(next(self.get_iterator("main")))
            twin = net.copy("copy")
            for model in (net, twin):
                model.cleargrads()
            for model, part in ((net, batch[:2]), (twin, batch[2:])):
                square(model(part)).backward()
            net.addgrads(twin)
            optimizer.update()

    def run(overlap: bool) -> Network:
        net = Network(comm.rank)
        optimizer = chainermn.create_multi_node_optimizer(
            optimizers.SGD(0.1), comm, overlap=overlap
        ).setup(net)
        data = np.concatenate([x(comm.rank, step) for step in range(6)])
        iterator = chainer.iterators.SerialIterator(data, 4, shuffle=False)
        kinds = {"standard": chainer.training.StandardUpdater, "parallel": TwoModels}
        updater = kinds[kind](iterator, optimizer, loss_func=lambda batch: square(net(batch)))
        chainer.training.Trainer(updater, (6, "iteration"), out=str(tmp_path)).run()
        return net

    assert_close(run(True), run(False), rtol=0)


@pytest.mark.mpi(1, 2)
def test_debug_mode_finds_gradients_that_are_not_finite(comm: CommunicatorBase) -> None:
    net = Network()
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, overlap=True)
    optimizer.setup(net)
    with chainer.using_config("debug", True):
        for step in range(3):
            by_update(net, optimizer, comm.rank, step)
        net.cleargrads()
        optimizer.backward(square(net(x(comm.rank, 3))))
        if comm.rank == comm.size - 1:
            net.a.W.grad = np.full_like(net.a.W.array, np.nan)
        with pytest.raises(ValueError, match="NaN or infinite"):
            optimizer.update()
        by_update(net, optimizer, comm.rank, 4)


@pytest.mark.mpi(1, 2)
def test_nothing_of_the_graph_or_the_optimizer_is_kept(comm: CommunicatorBase) -> None:
    before = set(threading.enumerate())
    net = Network()
    optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, overlap=True)
    optimizer.setup(net)
    gc.collect()
    gc.disable()
    try:
        for step in range(4):
            functions: list[Any] = []

            def loss(step: int = step, functions: list[Any] = functions) -> chainer.Variable:
                h = F.tanh(net.b(net.a(x(comm.rank, step))))
                functions.append(weakref.ref(h.creator_node))
                return square(net.c(h))

            optimizer.update(loss)
            assert functions[0]() is None
    finally:
        gc.enable()
    (thread,) = set(threading.enumerate()) - before
    del optimizer
    gc.collect()
    assert not thread.is_alive()


class Counted(MPI.Intracomm):
    """A communicator that counts its duplicates, and those of its duplicates."""

    n_duplicates = 0

    def Dup(self, *args: Any) -> Counted:
        Counted.n_duplicates += 1
        return Counted(super().Dup(*args))

    def Free(self) -> None:
        Counted.n_duplicates -= 1
        super().Free()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("settings", [{"overlap": True}, {"double_buffering": True}], ids=str)
def test_duplicates_of_the_communicator_are_freed(settings: dict[str, Any]) -> None:
    comm = NaiveCommunicator(Counted(MPI.COMM_WORLD))
    existing = []
    for _ in range(5):
        optimizer = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, **settings)
        optimizer.setup(Network())
        for step in range(3):
            by_update(optimizer.target, optimizer, comm.rank, step)
        if "double_buffering" in settings:
            optimizer.wait()
        existing.append(Counted.n_duplicates)
        del optimizer
        gc.collect()
    # Those in use, and the last ones given back.
    assert existing[4] == existing[3] == existing[2] > 0


@pytest.mark.mpi(3)
@pytest.mark.parametrize("step", [each_in_another_way, other_weights_on_each_rank])
@pytest.mark.parametrize("support", ["serialized", "funneled"])
@pytest.mark.parametrize("where", ["everywhere", "on one"])
def test_where_threads_may_not_call_mpi_at_the_same_time(
    comm: CommunicatorBase, step: Step, support: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = support if where == "everywhere" or comm.rank == comm.size - 1 else "multiple"
    monkeypatch.setattr(overlapped_exchange, "thread_support", lambda n_hosts: here)
    threads = set(threading.enumerate())
    assert_same_with_overlap(comm, step)
    assert here != "funneled" or threads.issuperset(threading.enumerate())


@pytest.mark.mpi(1, 2)
def test_says_where_a_communicator_cannot_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = chainermn.create_communicator("naive")
    plain = train(comm, False, by_update)
    mean_grad = comm.multi_node_mean_grad
    monkeypatch.setattr(comm, "multi_node_mean_grad", lambda *args: mean_grad(*args))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_equal(train(comm, True, by_update), plain)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (comm.rank == 0)
    assert all("overlap=True has no effect: Naive" in message for message in messages)


@pytest.mark.mpi(2)
def test_ranks_that_give_different_settings(comm: CommunicatorBase) -> None:
    settings: list[list[dict[str, Any]]] = [
        [{"overlap": True}, {"overlap": False}],
        [{"overlap": "auto"}, {"overlap": True}],
        [{"double_buffering": True}, {}],
    ]
    for each in settings:
        optimizer = chainermn.create_multi_node_optimizer(
            optimizers.SGD(), comm, **each[comm.rank]
        ).setup(Network())
        with pytest.raises(ValueError, match="the ranks disagree") as caught:
            optimizer.update()
        assert "rank 0" in str(caught.value)


def on_several_hosts(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(type(comm), "inter_size", comm.size)
    return comm


@pytest.mark.mpi(3)
@pytest.mark.parametrize("slow", ["with overlap", "without"])
def test_auto_keeps_what_is_faster(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations with and without overlap alternate until the faster is kept; no bit differs."""
    comm = on_several_hosts(chainermn.create_communicator("naive"), monkeypatch)
    is_slow_rank = comm.rank == comm.size - 1
    exchanges: list[str] = []
    now = 0.0
    monkeypatch.setattr(overlapping_optimizer, "perf_counter", lambda: now)

    def note(kind: str, owner: Any, is_slow: bool) -> None:
        actual = owner.mean

        def noted(*arguments: Any) -> Any:
            nonlocal now
            now += 2.0 if is_slow and is_slow_rank else 1.0
            exchanges.append(kind)
            return actual(*arguments)

        monkeypatch.setattr(owner, "mean", noted)

    note("after", GradientExchange, slow == "without")
    note("during", OverlappedExchange, slow == "with overlap")
    plain, tried = Network(0), Network(0)
    threads = set(threading.enumerate())
    for net, overlap in ((plain, False), (tried, "auto")):
        optimizer: Any = chainermn.create_multi_node_optimizer(
            optimizers.MomentumSGD(0.1), comm, overlap=overlap
        ).setup(net)
        exchanges.clear()
        for step in range(1 + 3 + 2 * 7 + 4):
            each_in_another_way(net, optimizer, comm.rank, step)
    kept = "during" if slow == "without" else "after"
    # The first update only makes the replicas equal.
    assert exchanges == ["after"] + ["during"] * 3 + ["during", "after"] * 7 + [kept] * 4
    # If threads may not call MPI, there is no extra thread in either case.
    assert kept == "during" or threads.issuperset(threading.enumerate())
    assert_close(tried, plain, rtol=0)


@pytest.mark.mpi(2)
def test_auto_where_ranks_fail_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = on_several_hosts(chainermn.create_communicator("naive"), monkeypatch)
    nets = [Network(0), Network(0)]
    for net, overlap in zip(nets, (False, "auto"), strict=True):
        optimizer: Any = chainermn.create_multi_node_optimizer(
            optimizers.SGD(0.1), comm, overlap=overlap
        ).setup(net)
        for step in range(25):
            if step % 5 == 4 and comm.rank == step % 2:
                h = net.b(net.a(x(comm.rank, step)))
                with pytest.raises(ZeroDivisionError):
                    optimizer.backward(square(net.c(_Failing().apply((h,))[0])))
            by_update(net, optimizer, comm.rank, step)
    assert_close(*nets, rtol=0)


def test_what_the_knob_takes(comm: CommunicatorBase) -> None:
    def create(**settings: Any) -> MultiNodeOptimizer:
        return chainermn.create_multi_node_optimizer(optimizers.SGD(), comm, **settings)

    assert type(create()) is MultiNodeOptimizer  # there is one host
    assert type(create(overlap="auto")) is MultiNodeOptimizer
    assert type(create(overlap=False)) is MultiNodeOptimizer
    assert type(create(overlap=True)) is OverlappingOptimizer
    assert type(create(double_buffering=True)) is DoubleBufferingOptimizer
    with pytest.raises(ValueError, match="exclude each other"):
        create(double_buffering=True, overlap=True)
    with pytest.raises(ValueError, match="True, False or 'auto', got 'yes'"):
        create(overlap="yes")


@pytest.mark.mpi(2)
def test_copies_train_on_their_own() -> None:
    import copy

    comm = chainermn.create_communicator("naive")
    one = chainermn.create_multi_node_optimizer(optimizers.SGD(0.1), comm, overlap=True)
    one.setup(Network())
    for step in range(3):
        by_update(one.target, one, comm.rank, step)
    other = copy.deepcopy(one)
    assert isinstance(other, OverlappingOptimizer)
    for step in range(3, 6):
        for optimizer in (one, other):
            by_update(optimizer.target, optimizer, comm.rank, step)
    assert_close(one.target, other.target, rtol=0)
