"""Communicators on arrays in GPU memory; host memory and MPI stand in for a GPU and NCCL."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
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
from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator
from chainermn.communicators.single_node_communicator import SingleNodeCommunicator
from chainermn.doctor.probes import device_memory
from chainermn.gradients.background import BackgroundExchange
from chainermn.transport.gpu.staging import CHUNK_BYTES
from chainermn.transport.topology import Topology

WORLD = MPI.COMM_WORLD
EXCHANGING = sorted(set(registered()) - {"dummy"})
LAYOUTS = {1: ["a"], 2: ["aa", "ab"], 3: ["aaa", "aab", "abc"], 4: ["aabb", "abab", "aaab"]}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def make(name: str, hosts: str = "", **settings: Any) -> Any:
    place = Topology.from_hosts(hosts or "a" * WORLD.size, WORLD.rank)
    return registered()[name](WORLD, topology=place, **settings)


def can_run(name: str, hosts: str) -> bool:
    return not registered()[name].why_not(Topology.from_hosts(hosts, 0))


def model_with(stand_in: Any, grads: dict[str, np.ndarray]) -> chainer.Chain:
    model = chainer.Chain()
    with model.init_scope():
        for name, grad in grads.items():
            parameter = chainer.Parameter(stand_in.to_gpu(np.zeros_like(grad)))
            parameter.grad = stand_in.to_gpu(grad)
            setattr(model, name, parameter)
    return model


def gradients(rank: int, dtypes: list[str]) -> dict[str, np.ndarray]:
    shapes = [(2, 3), (), (5,), (0, 4), (9000,)]
    return {
        f"{dtype}_{index}": np.random.default_rng([rank, index]).normal(size=shape).astype(dtype)
        for dtype in dtypes
        for index, shape in enumerate(shapes)
    }


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("name", EXCHANGING)
@pytest.mark.parametrize("dtypes", [["float32"], ["float16", "float32", "float64"]])
def test_mean_grad(stand_in: Any, name: str, dtypes: list[str], mpi_ranks: int) -> None:
    everywhere = [gradients(rank, dtypes) for rank in range(mpi_ranks)]
    for hosts in LAYOUTS[mpi_ranks]:
        if not can_run(name, hosts):
            continue
        comm = make(name, hosts)
        model = model_with(stand_in, everywhere[comm.rank])
        for _ in range(2):  # the second time uses what the first one kept
            for key, grad in everywhere[comm.rank].items():
                getattr(model, key).grad = stand_in.to_gpu(grad)
            comm.multi_node_mean_grad(model)
            for key in everywhere[0]:
                actual = getattr(model, key).grad
                expected = np.mean([grads[key].astype("f8") for grads in everywhere], axis=0)
                narrow = "float16" in key
                # pure_nccl exchanges in chainer.global_config.dtype, float32.
                tolerance = 3e-3 if narrow else 1e-6
                assert stand_in.holds(actual)
                assert actual.dtype == everywhere[0][key].dtype
                np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
                same = WORLD.allgather(np.asarray(actual).tobytes())
                assert len(set(same)) == 1
        comm.finalize()
    assert stand_in.library.open == 0


@pytest.mark.mpi(3)
@pytest.mark.parametrize("name", EXCHANGING)
@pytest.mark.parametrize("wire", ["float16", BFLOAT16, "float64"])
def test_dtype_on_the_wire(stand_in: Any, name: str, wire: Any) -> None:
    comm = make(name, allreduce_grad_dtype=wire)
    everywhere = [
        {"a": np.array([1, 2, 3], "f2") * size, "b": np.arange(4.0) * size, "c": np.ones(2, "f")}
        for size in (WORLD.size * (rank + 1) for rank in range(WORLD.size))
    ]
    model = model_with(stand_in, everywhere[comm.rank])
    comm.multi_node_mean_grad(model)
    for key in "abc":
        expected = np.mean([grads[key].astype("f8") for grads in everywhere], axis=0)
        np.testing.assert_array_equal(getattr(model, key).grad, expected)
    kernels = [entry for entry in stand_in.log if "_" in entry and "copy" not in entry]
    gather, scatter = (
        [f"{what}_{dtype}_{np.dtype(wire).name}" for dtype in ("float16", "float64", "float32")]
        for what in ("gather", "scatter")
    )
    if name == "naive":
        assert kernels == [kernel for pair in zip(gather, scatter, strict=True) for kernel in pair]
    else:
        assert kernels == gather + scatter
    comm.finalize()


@pytest.mark.mpi(2, 4)
def test_what_each_algorithm_uses(stand_in: Any, mpi_ranks: int) -> None:
    """Use NCCL inside a host, MPI between hosts; naive and flat use only MPI."""
    hosts = {2: "aa", 4: "aabb"}[mpi_ranks]
    through_host = {"copy_to_host", "copy_to_gpu"}
    expected: dict[str, set[str]] = {
        "naive": through_host,
        "flat": through_host,
        "pure_nccl": {"allReduce"},
    }
    if mpi_ranks == 2:
        for name in ("single_node", "hierarchical", "two_dimensional", "non_cuda_aware"):
            expected[name] = {"allReduce"}
    else:
        leader = {"reduce", "bcast", *(through_host if WORLD.rank in (0, 2) else ())}
        expected |= {"hierarchical": leader, "non_cuda_aware": leader}
        expected["two_dimensional"] = {"reduceScatter", "allGather", *through_host}
    for name, used in expected.items():
        comm = make(name, hosts)
        stand_in.log.clear()
        comm.multi_node_mean_grad(model_with(stand_in, {"a": np.arange(12, dtype="f")}))
        kernels = {"upload", "gather_float32_float32", "scatter_float32_float32"}
        assert set(stand_in.log) == used | kernels, name
        comm.finalize()


@pytest.mark.mpi(2)
def test_host_never_waits_for_nccl(stand_in: Any) -> None:
    comm = make("pure_nccl")
    comm.multi_node_mean_grad(model_with(stand_in, {"a": np.ones(5, "f")}))
    assert stand_in.waits == 0
    comm.finalize()


@pytest.mark.mpi(2)
def test_dtype_of_pure_nccl_is_chainers(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = make("pure_nccl")
    for dtype, name in {
        np.float16: "float16",
        chainer.mixed16: "float16",
        np.float64: "float64",
        np.float32: "float32",
    }.items():
        monkeypatch.setattr(chainer.global_config, "dtype", dtype)
        stand_in.log.clear()
        comm.multi_node_mean_grad(model_with(stand_in, {"a": np.ones(5, "f")}))
        assert f"gather_float32_{name}" in stand_in.log
    comm.set_config("allreduce_grad_dtype", "bfloat16")
    comm.multi_node_mean_grad(model_with(stand_in, {"a": np.ones(5, "f")}))
    assert stand_in.log[-1] == "scatter_float32_bfloat16"
    comm.finalize()


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("name", EXCHANGING)
def test_gradients_that_share_memory_or_are_in_pieces(stand_in: Any, name: str) -> None:
    comm = make(name)
    model = model_with(stand_in, {key: np.zeros((3, 3), "f") for key in "abc"})
    shared = stand_in.to_gpu(np.full((3, 3), comm.rank, "f"))
    model.a.grad = model.b.grad = shared
    model.c.grad = stand_in.to_gpu(np.arange(9, dtype="f").reshape(3, 3)).T
    comm.multi_node_mean_grad(model)
    for parameter in (model.a, model.b):
        assert (parameter.grad == (comm.size - 1) / 2).all()
    np.testing.assert_allclose(model.c.grad, np.arange(9).reshape(3, 3).T, rtol=1e-6)
    comm.finalize()


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
def test_gradients_that_lie_channels_last(stand_in: Any, name: str) -> None:
    comm = make(name)
    stored = np.arange(24, dtype="f").reshape(2, 2, 2, 3)
    model = chainer.Chain()
    with model.init_scope():
        model.a = chainer.Parameter(stand_in.to_gpu(stored + comm.rank).transpose(0, 3, 1, 2))
    gradient = stand_in.to_gpu(stored + comm.rank).transpose(0, 3, 1, 2)
    model.a.grad = gradient
    comm.multi_node_mean_grad(model)
    comm.bcast_data(model)
    assert model.a.grad is gradient
    expected = (stored + (comm.size - 1) / 2).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    np.testing.assert_array_equal(model.a.array, stored.transpose(0, 3, 1, 2))
    assert model.a.array.transpose(0, 2, 3, 1).flags.c_contiguous
    comm.finalize()


@pytest.mark.mpi(2, 3)
def test_some_parameters_in_host_memory(stand_in: Any) -> None:
    comm = make("pure_nccl")
    model = model_with(stand_in, {"a": np.full(3, comm.rank, "f"), "b": np.zeros(2, "f")})
    model.b = chainer.Parameter(np.zeros(2))
    model.b.grad = np.full(2, comm.rank + 1e-9)
    comm.multi_node_mean_grad(model)
    assert (model.a.grad == (comm.size - 1) / 2).all()
    # In host memory, nothing is rounded to chainer.global_config.dtype, float32.
    np.testing.assert_allclose(model.b.grad, (comm.size - 1) / 2 + 1e-9, rtol=1e-15)
    assert not stand_in.holds(model.b.grad)
    comm.finalize()


@pytest.mark.mpi(2, 3)
def test_models_in_different_memory(stand_in: Any) -> None:
    comm = make("pure_nccl")
    model = model_with(stand_in, {"a": np.ones(3, "f")})
    if comm.rank == 1:
        model.a.array = np.asarray(model.a.array).view(np.ndarray).copy()
        model.a.grad = np.ones(3, "f")
    message = r"rank 0: /a float32\[3\] in GPU memory; rank 1: /a float32\[3\]"
    for method in (comm.multi_node_mean_grad, comm.bcast_data):
        with pytest.raises(ValueError, match=message):
            method(model)
    comm.finalize()


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("name", EXCHANGING)
def test_bcast_data_and_zero_fill(stand_in: Any, name: str) -> None:
    comm = make(name)
    model = model_with(stand_in, {"a": np.ones((2, 3), "f"), "b": np.ones(4, "f2")})
    model.a.array[...] = comm.rank + 1
    model.b.array[...] = comm.rank + 2
    statistics = stand_in.to_gpu(np.full(3, comm.rank + 3, "f"))
    model.add_persistent("statistics", statistics)
    model.add_persistent("other", None if comm.rank else stand_in.to_gpu(np.full(2, 5, "f")))
    model.add_persistent("count", comm.rank)
    comm.bcast_data(model, persistent=True)
    assert stand_in.holds(model.a.array)
    assert (model.a.array == 1).all()
    assert (model.b.array == 2).all()
    assert model.statistics is statistics
    assert (statistics == 3).all()
    assert stand_in.holds(model.other)
    assert (model.other == 5).all()
    assert model.count == 0
    if comm.rank > 0:
        model.cleargrads()
    comm.multi_node_mean_grad(model, zero_fill=True)
    np.testing.assert_allclose(model.a.grad, np.full((2, 3), 1 / comm.size), rtol=1e-6)
    comm.finalize()


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "bool", "complex64"])
def test_collectives(stand_in: Any, name: str, dtype: str) -> None:
    comm = make(name)
    rank, size = comm.rank, comm.size

    def array(rank: int, shape: tuple[int, ...] = (2, 3)) -> Any:
        return stand_in.to_gpu((np.arange(np.prod(shape)) + rank).reshape(shape).astype(dtype))

    def check(actual: Any, expected: Any) -> None:
        assert stand_in.holds(actual)
        np.testing.assert_array_equal(actual, np.asarray(expected))
        assert actual.dtype == dtype

    root = size - 1
    check(comm.bcast(array(rank) if rank == root else None, root), array(root))
    for other, part in enumerate(comm.allgather(array(rank, (rank + 1,)))):
        check(part, array(other, (other + 1,)))
    gathered = comm.gather(array(rank), root)
    assert (gathered is None) == (rank != root)
    for other, part in enumerate(gathered or ()):
        check(part, array(other))
    stacked = array(0, (size, 4)) if rank == root else None
    check(comm.scatter(stacked, root), array(0, (size, 4))[rank])
    received = comm.alltoall([array(10 * rank + other, (other + 1,)) for other in range(size)])
    for other, part in enumerate(received):
        check(part, array(10 * other + rank, (rank + 1,)))
    first, second = comm.bcast((array(rank), array(rank, ())), 0)
    check(first, array(0))
    check(second, array(0, ()))
    if dtype not in ("bool", "complex64"):
        maxima = comm.allreduce(array(rank), "max")
        check(maxima, array(size - 1))
    if dtype == "bool":
        check(comm.allreduce(array(rank), "max"), np.ones((2, 3), bool) & (array(0) | (size > 1)))
    else:
        wide = "c16" if dtype == "complex64" else "f8"
        total = sum(np.asarray(array(other)).astype(wide) for other in range(size))
        check(comm.allreduce(array(rank)), total.astype(dtype))
    assert ("allReduce" in stand_in.log) == (name == "pure_nccl" and dtype != "complex64")
    comm.finalize()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
def test_messages(stand_in: Any, name: str) -> None:
    comm = make(name)
    given = np.arange(6, dtype="f").reshape(2, 3).T, np.zeros((0, 2), "i4")
    if comm.rank == 0:
        comm.send(tuple(map(stand_in.to_gpu, given)), 1, 4)
    else:
        for actual, expected in zip(comm.recv(0, 4), given, strict=True):
            assert stand_in.holds(actual)
            np.testing.assert_array_equal(actual, expected)
    comm.finalize()


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
def test_mixed_memory_is_refused_on_all_ranks(stand_in: Any, name: str) -> None:
    comm = make(name)
    host, device = np.ones(3, "f"), stand_in.to_gpu(np.ones(3, "f"))
    own = host if comm.rank == 1 else device
    for call in (comm.allreduce, comm.allgather, comm.gather):
        with pytest.raises(ValueError, match=r"float32\[3\] in GPU memory"):
            call(own)
    with pytest.raises(ValueError, match="in GPU memory"):
        comm.alltoall([own] * comm.size)
    message = r"rank 0: expected either NumPy or CuPy arrays, got some of both"
    with pytest.raises(TypeError, match=message):
        comm.bcast((host, device))
    with pytest.raises(TypeError, match=message):
        comm.scatter([host, *[device] * (comm.size - 1)])
    with pytest.raises(TypeError, match=message):
        comm.allreduce((host, device) if comm.rank == 0 else (device, device))
    comm.finalize()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", EXCHANGING)
def test_mpi_that_is_cuda_aware_gets_gpu_memory_only_to_move_it(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    """Give it GPU memory only in calls that the doctor tries."""
    import stand_in_mpi

    monkeypatch.setenv("CHAINERMN_CUDA_AWARE", "1")
    world = stand_in_mpi.CudaAwareMpi(WORLD)
    world.log.clear()
    hosts = "aa" if name == "single_node" else "ab"
    comm = registered()[name](world, topology=Topology.from_hosts(hosts, WORLD.rank))
    model = model_with(stand_in, {"a": np.full(5, comm.rank, dtype)})
    comm.multi_node_mean_grad(model)
    assert (model.a.grad == 0.5).all()
    exchange = BackgroundExchange(comm.gradients)
    model.a.grad = stand_in.to_gpu(np.full(5, comm.rank, dtype))
    exchange.start(model, False)
    exchange.wait()
    assert (model.a.grad == 0.5).all()
    own = stand_in.to_gpu(np.full(3, comm.rank, dtype))
    for op, expected in {"sum": 1, "max": 1, "min": 0, "mean": 0.5, "prod": 0}.items():
        assert (comm.allreduce(own, op) == expected).all()
    everywhere = [stand_in.to_gpu(np.full(3, rank, dtype)) for rank in range(2)]
    for one, other in zip(comm.allgather(own), everywhere, strict=True):
        assert (one == other).all()
    assert (comm.alltoall(everywhere)[0] == comm.rank).all()
    if comm.rank == 0:
        comm.send(own, 1)
    else:
        assert (comm.recv(0) == 0).all()
    comm.gather(own)
    comm.bcast_data(model)
    complex_sum = comm.allreduce(stand_in.to_gpu(np.full(3, 1j)))
    assert (complex_sum == 2j).all()
    comm.finalize()
    given = set.union(*WORLD.allgather({call for call, _ in world.log}))
    assert given == (set() if name == "non_cuda_aware" else stand_in_mpi.TAKING)


@pytest.mark.mpi(2, 3)
def test_the_doctor_tries_what_a_cuda_aware_mpi_is_given(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stand_in_mpi

    device = SimpleNamespace(use=lambda: None)
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(
        Device=lambda number: device, runtime=SimpleNamespace(getDeviceCount=lambda: 1)
    )
    cupy.dtype, cupy.zeros_like = np.dtype, np.zeros_like
    cupy.arange = lambda n, dtype: stand_in.to_gpu(np.arange(n, dtype=dtype))
    world = stand_in_mpi.CudaAwareMpi(WORLD)
    world.log.clear()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(MPI, "COMM_WORLD", world)
    assert device_memory() is (True if WORLD.rank == 0 else None)
    tried = set.union(*WORLD.allgather(world.log))
    assert {call for call, _ in tried} == stand_in_mpi.TAKING
    assert {size for _, size in tried} == {CHUNK_BYTES, CHUNK_BYTES // 2}


@pytest.mark.mpi(2)
def test_pinned_memory_is_freed_after_its_last_copy(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep it until then, since CuPy hands freed memory out again at once."""
    pinned: list[np.ndarray] = []
    allocate = stand_in.pinned
    monkeypatch.setattr(
        stand_in, "pinned", lambda n_bytes: pinned.append(allocate(n_bytes)) or pinned[-1]
    )
    comm = make("flat")
    stream = stand_in.new_stream()
    with stand_in.on(stream):
        total = comm.allreduce(stand_in.to_gpu(np.full(5, comm.rank + 1, "f")))
        model = model_with(stand_in, {"a": np.full(5, comm.rank, "f")})
        comm.multi_node_mean_grad(model)
        comm.finalize()
        for memory in pinned:
            memory[...] = 0xEE
        stand_in.record().Wait()
    assert (total == 3).all()
    assert (model.a.grad == 0.5).all()


@pytest.mark.mpi(2, 4)
def test_two_ranks_on_one_gpu(stand_in: Any) -> None:
    stand_in.address, stand_in.visible = "0000:07:00.0", 1
    comm = make("pure_nccl")
    message = "NCCL needs a GPU for each rank, but rank 1 .* ranks, and rank 1 sees 1 GPU"
    with pytest.raises(RuntimeError, match=message):
        comm.multi_node_mean_grad(model_with(stand_in, {"a": np.ones(5, "f")}))
    assert stand_in.library.made == 0


@pytest.mark.mpi(1, 2)
def test_default_is_pure_nccl_where_every_rank_can_have_a_gpu(
    stand_in: Any, recwarn: pytest.WarningsRecorder, mpi_ranks: int
) -> None:
    assert isinstance(chainermn.create_communicator(), PureNcclCommunicator)
    assert len(recwarn) == 0
    stand_in.visible = mpi_ranks - 1
    comm = chainermn.create_communicator()
    assert isinstance(comm, SingleNodeCommunicator)
    if mpi_ranks == 2 and comm.rank == 0:
        assert "a host has 2 ranks, but only 1 GPU" in str(recwarn.pop().message)
    assert len(recwarn) == 0


@pytest.mark.mpi(2)
def test_default_with_one_gpu_visible_to_each(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "devices", lambda: [stand_in.device()])
    assert isinstance(chainermn.create_communicator(), PureNcclCommunicator)


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("name", ["naive", "pure_nccl", "hierarchical"])
@pytest.mark.parametrize("double_buffering", [False, True])
def test_training_equals_that_in_host_memory(
    stand_in: Any, name: str, double_buffering: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chainer.global_config, "dtype", np.float64)
    comm = make(name)

    def train(place: Any) -> list[np.ndarray]:
        np.random.seed(0)
        with chainer.using_config("dtype", np.float64):
            model = chainer.Sequential(L.Linear(3, 8), F.tanh, L.Linear(8, 2))
        for parameter in model.params():
            parameter.array = place(parameter.array)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(0.1), comm, double_buffering, overlap=False
        ).setup(model)
        for step in range(6):
            generator = np.random.default_rng([step, comm.rank])
            x, t = generator.normal(size=(4, 3)), generator.normal(size=(4, 2))
            loss = F.mean_squared_error(model(x), t)
            model.cleargrads()
            loss.backward()
            for parameter in model.params():
                parameter.grad = place(parameter.grad)
            optimizer.update()
        getattr(optimizer, "wait", lambda: None)()
        return [np.asarray(parameter.array) for parameter in model.params()]

    on_gpu, in_host_memory = train(stand_in.to_gpu), train(np.array)
    assert "gather_float64_float64" in stand_in.log
    assert len(stand_in.streams) == double_buffering
    for actual, expected in zip(on_gpu, in_host_memory, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("backend", ["auto", "nccl", "mpi"])
def test_batch_normalization_by_nccl_and_by_mpi(stand_in: Any, backend: str) -> None:
    comm = make("pure_nccl")
    whole = np.random.default_rng(0).normal(size=(4 * comm.size, 5)).astype("f")
    layer = chainermn.links.MultiNodeBatchNormalization(5, comm, communication_backend=backend)
    own = stand_in.to_gpu(whole[4 * comm.rank :][:4])
    y = layer(own)
    expected = L.BatchNormalization(5)(whole)
    np.testing.assert_allclose(y.array, expected.array[4 * comm.rank :][:4], atol=1e-5)
    assert ("allReduce" in stand_in.log) == (backend != "mpi")
    assert ("copy_to_host" in stand_in.log) == (backend == "mpi")
    comm.finalize()
