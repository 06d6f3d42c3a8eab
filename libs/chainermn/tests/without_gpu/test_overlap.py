"""Gradients in GPU memory, exchanged on a stream of their own while backward computes others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.compression import Compression, Quantization, TopK
from chainermn.gradients.overlap import plan as rounds
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn.transport.topology import Topology

WORLD = MPI.COMM_WORLD
EXCHANGING = sorted(set(registered()) - {"dummy"})
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STEPS = 5

Place = Callable[[Any], Any]
Step = Callable[[Any, MultiNodeOptimizer, Place, int], None]


@pytest.fixture(autouse=True)
def _many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "BUCKET_BYTES", 40)
    monkeypatch.setattr(rounds, "GPU_BUCKET_BYTES", 40)


class _Same(chainer.FunctionNode):
    """An identity that keeps gradients in the value's kind of memory, unlike NumPy's functions."""

    def forward(self, inputs: Any) -> Any:
        self._kind = type(inputs[0])
        return inputs[:1]

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        array = grad_outputs[0].array
        if not isinstance(array, self._kind):
            array = np.array(array, order="K", subok=False).view(self._kind)
        return chainer.Variable(array), None


def same(parameter: chainer.Parameter, beside: Any) -> chainer.Variable:
    """Return the parameter, placed next to ``beside`` in the graph."""
    (value,) = _Same().apply((parameter, chainer.as_variable(beside)))
    return value


class Layer(L.Linear):
    def forward(self, x: Any) -> Any:
        return F.linear(x, same(self.W, x), same(self.b, x))


class Network(chainer.Chain):
    def __init__(self, place: Place, names: str = "abc") -> None:
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.a = Layer(3, 6)
            self.b = Layer(6, 6)
            self.c = Layer(6, 2)
            self.wide = chainer.Parameter(np.ones((2, 3)))
        self.move(place, names)

    def move(self, place: Place, names: str = "abc") -> None:
        """Move some of the layers to other memory."""
        for name in names:
            for parameter in self[name].params():
                parameter.array = place(parameter.array)
        if len(names) == 3:
            self.wide.array = place(self.wide.array)

    def forward(self, x: Any) -> Any:
        return self.c(F.tanh(self.b(F.tanh(self.a(x)))))


def make(name: str, **settings: Any) -> Any:
    hosts = "a" * WORLD.size if name == "single_node" else ("ab" * WORLD.size)[: WORLD.size]
    if name == "two_dimensional" and WORLD.size % 2:
        hosts = "a" * WORLD.size
    place = Topology.from_hosts(hosts, WORLD.rank)
    return registered()[name](WORLD, topology=place, **settings)


def x(step: int) -> np.ndarray:
    return np.random.default_rng([WORLD.rank, step]).normal(size=(4, 3)).astype(np.float32)


def square(y: chainer.Variable) -> chainer.Variable:
    return F.mean(y**2)


def train(
    comm: Any, overlap: bool, place: Place, step: Step, names: str = "abc", **settings: Any
) -> Any:
    """Return the parameters after some steps, in host memory."""
    net = Network(place, names)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, overlap=overlap, **settings
    ).setup(net)
    net.cleargrads()
    optimizer.update()  # makes the replicas equal
    for number in range(STEPS):
        step(net, optimizer, place, number)
    return {name: np.array(parameter.array) for name, parameter in net.namedparams()}


def assert_same_with_overlap(
    stand_in: Any, comm: Any, step: Step, *, rtol: float = 1e-6, **kwds: Any
) -> None:
    plain = train(comm, False, stand_in.to_gpu, step, **kwds)
    assert not stand_in.streams
    overlapped = train(comm, True, stand_in.to_gpu, step, **kwds)
    assert len(stand_in.streams) == 1
    for name, value in overlapped.items():
        np.testing.assert_allclose(value, plain[name], rtol=rtol, atol=rtol, err_msg=name)
        assert len(set(WORLD.allgather(value.tobytes()))) == 1
    comm.finalize()


# ---- what a user may do in an iteration ----


def by_update(net: Any, optimizer: MultiNodeOptimizer, place: Place, step: int) -> None:
    optimizer.update(lambda: square(net(place(x(step)))))


def by_hand(net: Any, optimizer: MultiNodeOptimizer, place: Place, step: int) -> None:
    net.cleargrads()
    loss = square(net(place(x(step))))
    (optimizer.backward if (step + WORLD.rank) % 2 else chainer.Variable.backward)(loss)
    optimizer.update()


def other_weights(net: Any, optimizer: MultiNodeOptimizer, place: Place, step: int) -> None:
    def loss() -> chainer.Variable:
        h = net.a(place(x(step)))
        if (WORLD.rank + step) % 2:
            h = F.tanh(net.b(h))
        return square(net.c(h))

    optimizer.update(loss)


def shared_and_transposed(
    net: Any, optimizer: MultiNodeOptimizer, place: Place, step: int
) -> None:
    """Compute gradients that share memory, and some that are not contiguous."""

    def loss() -> chainer.Variable:
        h = F.tanh(net.b(F.tanh(net.b(net.a(place(x(step)))))))
        w = F.sum(F.transpose(same(net.wide, h)) * place(np.arange(6.0).reshape(3, 2)))
        shared = same(net.a.W, h) + same(net.b.W, h)[:, :3]
        return square(net.c(h)) + F.cast(w, np.float32) + F.sum(shared)

    optimizer.update(loss)


def replaced(net: Any, optimizer: MultiNodeOptimizer, place: Place, step: int) -> None:
    net.cleargrads()
    optimizer.backward(square(net(place(x(step)))))
    if WORLD.rank == 0 or step % 2:
        net.b.W.grad = net.b.W.grad * 2
    optimizer.update()


class _Failing(chainer.FunctionNode):
    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        raise ZeroDivisionError


def failing(net: Any, optimizer: MultiNodeOptimizer, place: Place, step: int) -> None:
    if step == 2:
        h = net.a(place(x(step)))
        if WORLD.rank:
            (h,) = _Failing().apply((h,))
            with pytest.raises(ZeroDivisionError):
                optimizer.update(lambda: square(net.c(net.b(h))))
            net.cleargrads()
            optimizer.update()
        else:
            optimizer.update(lambda: square(net.c(net.b(h))))
    by_update(net, optimizer, place, step)


def moved_to_the_gpu(net: Any, optimizer: MultiNodeOptimizer, place: Place, step: int) -> None:
    if step == 0:
        net.move(np.array)
    if step == 2:
        net.move(place)
    by_update(net, optimizer, place if step >= 2 else np.array, step)


CASES = [by_update, by_hand, other_weights, shared_and_transposed, replaced]


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
@pytest.mark.parametrize("step", CASES)
def test_same_as_after_backward(stand_in: Any, name: str, step: Step) -> None:
    assert_same_with_overlap(stand_in, make(name), step)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("name", ["flat", "pure_nccl", "two_dimensional"])
@pytest.mark.parametrize(
    "compression",
    # Not PowerSGD: its products would wait for CuPy's streams, but not for the stand-in's.
    [TopK(density=0.2, min_size=12), Quantization(min_size=12)],
    ids=lambda compression: type(compression).__name__,
)
def test_compressed(stand_in: Any, name: str, compression: Compression) -> None:
    assert_same_with_overlap(stand_in, make(name), by_hand, compression=compression)


@pytest.mark.mpi(2)
def test_setting_up_leaves_no_work_that_would_outlive_its_memory(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, on = make("pure_nccl"), stand_in.on
    left: list[int] = []

    @contextlib.contextmanager
    def counting(stream: Any) -> Iterator[None]:
        with on(stream):
            yield
        left.append(len(stream.work))

    monkeypatch.setattr(stand_in, "on", counting)
    train(comm, True, stand_in.to_gpu, by_update)
    assert left[0] == 0 < max(left)
    comm.finalize()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("name", EXCHANGING)
def test_all_algorithms_take_part(stand_in: Any, name: str) -> None:
    assert_same_with_overlap(stand_in, make(name), by_update)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
@pytest.mark.parametrize("step", [failing, moved_to_the_gpu])
def test_goes_on_after(stand_in: Any, name: str, step: Step) -> None:
    comm = make(name)
    plain = train(comm, False, stand_in.to_gpu, step)
    overlapped = train(comm, True, stand_in.to_gpu, step)
    for key, value in overlapped.items():
        np.testing.assert_allclose(value, plain[key], rtol=1e-6, atol=1e-6)
    comm.finalize()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
def test_some_layers_in_host_memory(stand_in: Any, name: str) -> None:
    assert_same_with_overlap(stand_in, make(name), by_update, names="b")


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", ["naive", "two_dimensional", "pure_nccl"])
@pytest.mark.parametrize("wire", ["float16", BFLOAT16, "float64"])
def test_dtype_on_the_wire(stand_in: Any, name: str, wire: Any) -> None:
    comm = make(name, allreduce_grad_dtype=wire)
    assert_same_with_overlap(stand_in, comm, by_update)
    assert f"gather_float32_{np.dtype(wire).name}" in stand_in.log


@pytest.mark.mpi(2)
def test_dtype_on_the_wire_that_changes(stand_in: Any) -> None:
    changes = {1: "float16", 3: "float32"}

    def step(net: Any, optimizer: MultiNodeOptimizer, place: Place, number: int) -> None:
        net.cleargrads()
        optimizer.backward(square(net(place(x(number)))))
        if number in changes:
            optimizer.communicator.set_config("allreduce_grad_dtype", changes[number])
        optimizer.update()

    plain = train(make("pure_nccl"), False, stand_in.to_gpu, step)
    overlapped = train(make("pure_nccl"), True, stand_in.to_gpu, step)
    for name, value in overlapped.items():
        np.testing.assert_array_equal(value, plain[name])


@pytest.mark.mpi(1, 2)
def test_backward_goes_on_while_nccl_works(stand_in: Any) -> None:
    """Give the stream its work before all gradients are there, and never make the host wait."""
    comm = make("pure_nccl")
    net = Network(stand_in.to_gpu)
    under_way: list[Any] = []

    class Probe(chainer.FunctionNode):
        def forward(self, inputs: Any) -> Any:
            return inputs

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            assert net.a.W.grad is None
            if stand_in.streams:
                under_way.extend(stand_in.streams[0].work)
            return grad_outputs

    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, overlap=True
    ).setup(net)
    for step in range(4):
        under_way.clear()
        waits = stand_in.waits
        optimizer.update(
            lambda step=step: square(
                net.c(Probe().apply((net.b(net.a(stand_in.to_gpu(x(step)))),))[0])
            )
        )
    assert stand_in.waits == waits
    # The stream first waits for what backward has computed.
    first, *others = under_way
    assert first.__self__.stream is None
    assert len(others) >= 3  # gather, all-reduce, and the event that update waits for
    assert not stand_in.streams[0].work
    comm.finalize()


@pytest.mark.mpi(2, 3)
def test_collectives_of_backward_itself(stand_in: Any) -> None:
    """Run collectives like batch normalization's; the NCCL stand-in reports a deadlock."""
    comm = make("pure_nccl")
    found: list[int] = []

    class Total(chainer.FunctionNode):
        def forward(self, inputs: Any) -> Any:
            return inputs

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            if stand_in.streams:
                found.append(len(stand_in.library.in_flight))
            total = comm.allreduce(stand_in.to_gpu(np.full(2, comm.rank)))
            assert (total == comm.size * (comm.size - 1) / 2).all()
            return grad_outputs

    def step(net: Any, optimizer: MultiNodeOptimizer, place: Place, number: int) -> None:
        def loss() -> chainer.Variable:
            (between,) = Total().apply((net.b(net.a(place(x(number)))),))
            return square(net.c(between))

        optimizer.update(loss)

    assert_same_with_overlap(stand_in, comm, step)
    assert max(found) > 0


@pytest.mark.mpi(2)
def test_auto_leaves_gpu_memory_to_the_time_after_backward(
    stand_in: Any, recwarn: pytest.WarningsRecorder
) -> None:
    comm = make("naive")
    assert comm.inter_size == 2
    threads = set(threading.enumerate())
    net = Network(stand_in.to_gpu)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(net)
    for step in range(3):
        by_update(net, optimizer, stand_in.to_gpu, step)
    assert not stand_in.streams
    assert threads.issuperset(threading.enumerate())
    assert not recwarn.list
    comm.finalize()
