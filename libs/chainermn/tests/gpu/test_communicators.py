"""Communicators, functions, links and optimizers on a real GPU."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
import chainermn.functions as MF
from chainermn.communicators import registered
from chainermn.compression import PowerSGD
from chainermn.gradients.background import BackgroundExchange
from chainermn.gradients.buckets import Wire
from chainermn.gradients.parameters import Proposal
from chainermn.gradients.step import Step

pytestmark = pytest.mark.gpu
BY_MPI = ["naive", "flat"]
BY_NCCL = sorted(set(registered()) - {"dummy", *BY_MPI})


def model_with(a_gpu: Any, grads: list[np.ndarray]) -> chainer.ChainList:
    model = chainer.Chain()
    with model.init_scope():
        for index, grad in enumerate(grads):
            parameter = chainer.Parameter(a_gpu.to_gpu(np.zeros_like(grad)))
            parameter.grad = a_gpu.to_gpu(grad)
            setattr(model, f"p{index}", parameter)
    return model


def check_mean_grad(a_gpu: Any, name: str, wire: str | None) -> None:
    comm = chainermn.create_communicator(name, allreduce_grad_dtype=wire)
    shapes = [(3, 4), (), (5,), (0, 2), (100_000,)]
    everywhere = [
        [
            np.random.default_rng([rank, index]).normal(size=shape).astype("f4")
            for index, shape in enumerate(shapes)
        ]
        for rank in range(comm.size)
    ]
    model = model_with(a_gpu, everywhere[comm.rank])
    if comm.size == 1:  # on one rank, communicators leave gradients alone
        exchange = comm.gradients
        on_wire = Wire(exchange.wire_dtype, exchange.wire_dtype)
        proposal = Proposal(model, False, exchange.wire_dtype, Step())
        agreed = proposal.agreed(comm.mpi_comm)
        buckets = exchange._buckets_for(agreed, on_wire, None, model)
        exchange.average(agreed.parameters, buckets, on_wire)
    comm.multi_node_mean_grad(model)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(str(wire), 1e-6)
    for index in range(len(shapes)):
        expected = np.mean([grads[index] for grads in everywhere], axis=0)
        grad = getattr(model, f"p{index}").grad
        assert a_gpu.holds(grad)
        actual = a_gpu.to_host(grad)
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
        assert len(set(comm.allgather_obj(actual.tobytes()))) == 1
    comm.finalize()


@pytest.mark.mpi(2, timeout=120)
@pytest.mark.parametrize("name", BY_MPI)
def test_no_mpi_adds_up_gpu_memory(a_gpu: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPI that is not CUDA-aware would crash if asked to."""
    monkeypatch.setenv("CHAINERMN_CUDA_AWARE", "1")
    check_mean_grad(a_gpu, name, None)
    comm = chainermn.create_communicator(name)
    total = comm.allreduce(a_gpu.to_gpu(np.arange(3_000_000.0)))
    np.testing.assert_array_equal(a_gpu.to_host(total), np.arange(3_000_000.0) * comm.size)
    comm.finalize()


WIRES = [None, "float16", "bfloat16", "float64"]


@pytest.mark.mpi(1, 2, 3, timeout=120)
@pytest.mark.parametrize("name", BY_MPI)
@pytest.mark.parametrize("wire", WIRES)
def test_mean_grad_by_mpi(a_gpu: Any, name: str, wire: str | None) -> None:
    check_mean_grad(a_gpu, name, wire)


@pytest.mark.mpi(1, 2, 4, timeout=120)
@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("name", BY_NCCL)
@pytest.mark.parametrize("wire", WIRES)
def test_mean_grad_by_nccl(a_gpu: Any, name: str, wire: str | None) -> None:
    check_mean_grad(a_gpu, name, wire)


def check_collectives(a_gpu: Any, name: str, dtype: str) -> None:
    comm = chainermn.create_communicator(name)
    rank, size = comm.rank, comm.size

    def array(rank: int) -> Any:
        return (np.arange(6) + rank).reshape(2, 3).astype(dtype)

    def check(actual: Any, expected: np.ndarray) -> None:
        assert a_gpu.holds(actual)
        np.testing.assert_array_equal(a_gpu.to_host(actual), expected, strict=True)

    own = a_gpu.to_gpu(array(rank))
    check(comm.bcast(own, size - 1), array(size - 1))
    for other, part in enumerate(comm.allgather(own)):
        check(part, array(other))
    for other, part in enumerate(comm.gather(own) or ()):
        check(part, array(other))
    check(comm.scatter([a_gpu.to_gpu(array(other)) for other in range(size)]), array(rank))
    for other, part in enumerate(comm.alltoall([own] * size)):
        check(part, array(other))
    check(comm.allreduce(own, "max"), array(size - 1))
    check(
        comm.allreduce(own), sum(array(other).astype("f8") for other in range(size)).astype(dtype)
    )
    if size > 1 and rank < 2:
        if rank == 0:
            comm.send((own.T, own), 1)
        else:
            first, second = comm.recv(0)
            check(first, array(0).T)
            check(second, array(0))
    if size > 1:
        with pytest.raises(ValueError, match="in GPU memory"):
            comm.allreduce(own if rank == 0 else array(0))
    comm.finalize()


COLLECTIVE_DTYPES = ["float16", "float32", "float64", "int64", "uint8"]


@pytest.mark.mpi(1, 2, 3, timeout=120)
@pytest.mark.parametrize("dtype", COLLECTIVE_DTYPES)
def test_collectives_by_mpi(a_gpu: Any, dtype: str) -> None:
    check_collectives(a_gpu, "naive", dtype)


@pytest.mark.mpi(1, 2, 3, timeout=120)
@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("dtype", COLLECTIVE_DTYPES)
def test_collectives_by_nccl(a_gpu: Any, dtype: str) -> None:
    check_collectives(a_gpu, "pure_nccl", dtype)


@pytest.mark.mpi(2, 3, timeout=120)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_functions(a_gpu: Any, dtype: str) -> None:
    """Expect the same values and gradients as in host memory."""
    comm = chainermn.create_communicator("naive")
    rank, size = comm.rank, comm.size

    def run(place: Any) -> list[np.ndarray]:
        def variable(seed: int) -> chainer.Variable:
            values = np.random.default_rng([seed, rank]).normal(size=(size, 2)).astype(dtype)
            return chainer.Variable(place(values))

        results: list[Any] = []
        for function in (
            lambda x: MF.allreduce(comm, x),
            lambda x: MF.bcast(comm, x if rank == 0 else None),
            lambda x: F.stack(MF.allgather(comm, x)),
            lambda x: F.stack(MF.alltoall(comm, F.separate(x))),
            lambda x: MF.reduce_scatter(comm, F.separate(x)),
            lambda x: MF.scatter(comm, F.separate(x) if rank == 0 else None),
        ):
            x = variable(1)
            y = function(x)
            loss = F.sum(y * y)
            loss.backward()
            results += [y.array, x.grad]
        x = variable(2)
        gathered = MF.gather(comm, x)
        (F.sum(F.stack(gathered) ** 2) if rank == 0 else gathered).backward()
        results.append(x.grad)
        # Send around a ring.
        x = variable(3)
        right, left = (rank + 1) % size, (rank - 1) % size
        if rank == 0:
            delegate = MF.send(x, comm, right)
            loss = F.sum(MF.recv(comm, left, delegate_variable=delegate) ** 2)
            loss.backward()
        else:
            MF.send(MF.recv(comm, left) * x, comm, right).backward()
        results.append(x.grad)
        return results

    on_gpu, in_host_memory = run(a_gpu.to_gpu), run(np.array)
    tolerance = 1e-2 if dtype == "float16" else 1e-5
    for actual, expected in zip(on_gpu, in_host_memory, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert a_gpu.holds(actual)
            np.testing.assert_allclose(
                a_gpu.to_host(actual), expected, rtol=tolerance, atol=tolerance
            )
    comm.finalize()


def check_batch_normalization(a_gpu: Any, name: str, backend: str) -> None:
    comm = chainermn.create_communicator(name)
    whole = np.random.default_rng(0).normal(size=(4 * comm.size, 5)).astype("f")
    layer = chainermn.links.MultiNodeBatchNormalization(5, comm, communication_backend=backend)
    layer.to_device(chainer.backend.get_device_from_array(a_gpu.to_gpu(whole)))
    x = chainer.Variable(a_gpu.to_gpu(whole[4 * comm.rank :][:4]))
    y = layer(x)
    F.sum(y**3).backward()
    reference, alone = L.BatchNormalization(5), chainer.Variable(whole)
    z = reference(alone)
    F.sum(z**3).backward()
    own = slice(4 * comm.rank, 4 * comm.rank + 4)
    np.testing.assert_allclose(a_gpu.to_host(y.array), z.array[own], atol=1e-5)
    np.testing.assert_allclose(a_gpu.to_host(x.grad), alone.grad[own], atol=1e-4)
    np.testing.assert_allclose(a_gpu.to_host(layer.avg_var), reference.avg_var, atol=1e-5)
    comm.finalize()


@pytest.mark.mpi(1, 2, 3, timeout=120)
def test_batch_normalization_by_mpi(a_gpu: Any) -> None:
    check_batch_normalization(a_gpu, "naive", "mpi")


@pytest.mark.mpi(1, 2, 3, timeout=120)
@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_batch_normalization_by_nccl(a_gpu: Any, backend: str) -> None:
    check_batch_normalization(a_gpu, "pure_nccl", backend)


COMPRESSION = PowerSGD(rank=1, min_ratio=1, start_iteration=2)
WAYS_TO_EXCHANGE = [
    {"overlap": False},
    {"overlap": True},
    {"double_buffering": True},
    {"compression": COMPRESSION},
    {"overlap": True, "compression": COMPRESSION},
]


def check_training(a_gpu: Any, name: str, settings: dict[str, Any]) -> None:
    comm = chainermn.create_communicator(name)

    def train(device: Any) -> list[np.ndarray]:
        np.random.seed(0)
        # Its collectives run while gradients are being exchanged.
        normalize = chainermn.links.MultiNodeBatchNormalization(8, comm)
        model = chainer.Sequential(L.Linear(3, 8), normalize, F.tanh, L.Linear(8, 2))
        model.to_device(device)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(0.1), comm, **settings
        ).setup(model)
        for step in range(8):
            generator = np.random.default_rng([step, comm.rank])
            x = device.send(generator.normal(size=(4, 3)).astype("f"))
            t = device.send(generator.normal(size=(4, 2)).astype("f"))
            optimizer.update(lambda x, t: F.mean_squared_error(model(x), t), x, t)
        getattr(optimizer, "wait", lambda: None)()
        model.to_device("@numpy")
        return [parameter.array for parameter in model.params()]

    device = chainer.backend.get_device_from_array(a_gpu.to_gpu(np.zeros(1)))
    for actual, expected in zip(train(device), train(chainer.get_device("@numpy")), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)
    comm.finalize()


@pytest.mark.mpi(2, timeout=120)
@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("name", BY_NCCL)
def test_two_models_at_a_time_by_nccl(a_gpu: Any, name: str) -> None:
    """Kernels must start in the same order on both GPUs, or they deadlock."""
    comm = chainermn.create_communicator(name)
    exchanges = [BackgroundExchange(comm.gradients) for _ in range(2)]
    for step in range(30):
        models = [
            model_with(a_gpu, [np.full(500_000, comm.rank + step + number, "f")])
            for number in range(3)
        ]
        for exchange, model in zip(exchanges, models, strict=False):
            exchange.start(model, False)
        comm.multi_node_mean_grad(models[2])
        for exchange in exchanges:
            exchange.wait()
        for number, model in enumerate(models):
            mean = (comm.size - 1) / 2 + step + number
            np.testing.assert_array_equal(a_gpu.to_host(model.p0.grad), np.full(500_000, mean))
    comm.finalize()


@pytest.mark.mpi(1, 2, timeout=120)
@pytest.mark.parametrize("settings", WAYS_TO_EXCHANGE, ids=str)
def test_training_by_mpi(a_gpu: Any, settings: dict[str, Any]) -> None:
    check_training(a_gpu, "flat", settings)


@pytest.mark.mpi(1, 2, timeout=120)
@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("settings", WAYS_TO_EXCHANGE, ids=str)
def test_training_by_nccl(a_gpu: Any, settings: dict[str, Any]) -> None:
    check_training(a_gpu, "pure_nccl", settings)
