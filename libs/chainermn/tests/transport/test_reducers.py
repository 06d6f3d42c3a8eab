"""Sums over real ranks, by MPI and by shared memory, compared with sums in one process."""

from __future__ import annotations

import errno
import os
import socket
import tracemalloc
from collections.abc import Callable
from typing import Any

import chainer
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.agreement import pack
from chainermn.gradients.step import Step
from chainermn.transport.host import barrier, in_turn, mpi_reducer, reducers, shared_memory
from chainermn.transport.host.arithmetic import Adder
from chainermn.transport.host.in_turn import InTurnReducer
from chainermn.transport.host.memory import share_memory
from chainermn.transport.host.mpi_reducer import MpiReducer
from chainermn.transport.host.reducers import HostReducers, SingleReducer
from chainermn.transport.host.shared_memory import SharedMemoryReducer
from chainermn.transport.reducer import Reducer, Steps, shard_bounds
from chainermn.transport.topology import Topology

pytestmark = pytest.mark.each_mpi

WORLD = MPI.COMM_WORLD
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# With 256-byte chunks: no elements, fewer than ranks, primes, a chunk give or take one.
SIZES = [0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 509, 1000]


def by_mpi(comm: MPI.Intracomm = WORLD) -> Reducer:
    return MpiReducer(comm, Adder())


def by_shared_memory(comm: MPI.Intracomm = WORLD) -> Reducer:
    memory = share_memory(comm, shared_memory.bytes_needed(comm.size))
    return SharedMemoryReducer(comm, memory, Adder())


def in_turns(comm: MPI.Intracomm = WORLD) -> Reducer:
    return InTurnReducer(comm, share_memory(comm, in_turn.bytes_needed(comm.size)), Adder())


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mpi_reducer, shared_memory, in_turn):
        monkeypatch.setattr(module, "CHUNK_BYTES", 256)
    for name in "SMALL_BYTES", "SMALL_BYTES_OF_TWO":
        monkeypatch.setattr(mpi_reducer, name, 64)


def finish(steps: Steps) -> object:
    while True:
        try:
            next(steps).Wait()
        except StopIteration as end:
            return end.value


def average(comm: Any, gradient: np.ndarray) -> None:
    """Replace a gradient by its mean over the ranks."""
    model = chainer.Chain()
    with model.init_scope():
        model.p = chainer.Parameter(np.zeros_like(gradient))
    model.p.grad = gradient
    comm.multi_node_mean_grad(model)


def arrays(n: int, dtype: str | np.dtype) -> list[np.ndarray]:
    return [
        np.random.default_rng([n, rank]).normal(size=n).astype(dtype) for rank in range(WORLD.size)
    ]


def mean(parts: list[np.ndarray], wire: np.dtype) -> np.ndarray:
    """Return the promised mean, exact to the last bit."""
    wide = np.dtype("f4") if wire.itemsize == 2 else wire
    total = parts[0].astype(wire).astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wire).astype(wide)
    return (total / wide.type(len(parts))).astype(wire).astype(parts[0].dtype)


@pytest.mark.mpi(2, 3, 4)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("make", [by_mpi, by_shared_memory, in_turns])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_allreduce(make: Callable[[], Reducer], dtype: str) -> None:
    reducer = make()
    for wire in (np.dtype(dtype), np.dtype("f2"), BFLOAT16, np.dtype("f4")):
        for n in SIZES:
            parts = arrays(n, dtype)
            own = parts[reducer.rank].copy()
            finish(reducer.allreduce(own, reducer.size, wire))
            # Within a host's memory, nothing is rounded to the wire dtype.
            rounded_to = wire if make is by_mpi else np.dtype(dtype)
            np.testing.assert_array_equal(own, mean(parts, rounded_to), strict=True)


@pytest.mark.mpi(2, 3, 4)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("make", [by_mpi, by_shared_memory, in_turns])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_parts_of_an_allreduce(make: Callable[[], Reducer], dtype: str) -> None:
    reducer = make()
    rank, size = reducer.rank, reducer.size
    for n in SIZES:
        parts = arrays(n, dtype)
        expected = mean(parts, np.dtype(dtype))
        begin, end = shard_bounds(n, size)[rank]

        own = parts[rank].copy()
        finish(reducer.reduce(own, size))
        if rank == 0:
            np.testing.assert_array_equal(own, expected, strict=True)
        finish(reducer.bcast(own))
        np.testing.assert_array_equal(own, expected, strict=True)

        own = parts[rank].copy()
        shard = finish(reducer.reduce_scatter(own, size))
        np.testing.assert_array_equal(shard, expected[begin:end], strict=True)
        assert n == 0 or np.shares_memory(shard, own) or begin == end
        finish(reducer.allgather(own))
        np.testing.assert_array_equal(own, expected, strict=True)


@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize("make", [by_mpi, by_shared_memory, in_turns])
@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_chunks_of_their_real_size(make: Callable[[], Reducer], wire: str) -> None:
    n = (3 << 18) + 101
    parts = arrays(n, "float32")
    reducer = make()
    own = parts[reducer.rank].copy()
    finish(reducer.allreduce(own, reducer.size, np.dtype(wire)))
    rounded_to = np.dtype(wire if make is by_mpi else "float32")
    np.testing.assert_array_equal(own, mean(parts, rounded_to))


@pytest.mark.mpi(2, 3)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("make", [by_mpi, by_shared_memory, in_turns])
def test_two_under_way_in_turn(make: Callable[[MPI.Intracomm], Reducer]) -> None:
    parts = arrays(500, "float32")
    expected = mean(parts, np.dtype("f4"))
    duplicates = [WORLD.Dup(), WORLD.Dup()]
    reducers = [make(comm) for comm in duplicates]
    owns = [parts[WORLD.rank].copy() for _ in reducers]
    running = [r.allreduce(own, r.size) for r, own in zip(reducers, owns, strict=True)]
    if WORLD.rank == 1:
        running.reverse()  # ranks may look after them in different orders
    waits = [None] * len(running)
    while running:
        for index in reversed(range(len(running))):
            if waits[index] is None or waits[index].Test():
                waits[index] = next(running[index], None)
                if waits[index] is None:
                    del running[index], waits[index]
    for own in owns:
        np.testing.assert_array_equal(own, expected)
    for comm in duplicates:
        comm.Free()


@pytest.mark.mpi(2, 3)
@pytest.mark.usefixtures("small_chunks")
def test_processors_that_reorder_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "KEEPS_ORDER", False)
    parts = arrays(1000, "float32")
    reducer = by_shared_memory()
    own = parts[reducer.rank].copy()
    finish(reducer.allreduce(own, reducer.size))
    np.testing.assert_array_equal(own, mean(parts, np.dtype("f4")))


def test_one_rank() -> None:
    reducer = SingleReducer()
    array = np.array([1, 2, 3], "f")
    finish(reducer.allreduce(array, 2, np.dtype("f2")))
    assert array.tolist() == [0.5, 1, 1.5]
    shard = finish(reducer.reduce_scatter(array, 2))
    assert shard is array
    for steps in (reducer.allgather(array), reducer.bcast(array), reducer.reduce(array, 1)):
        finish(steps)
    assert array.tolist() == [0.25, 0.5, 0.75]


@pytest.mark.mpi(2)
@pytest.mark.parametrize("make", [by_mpi, by_shared_memory, in_turns])
@pytest.mark.parametrize("wire", ["float32", "float16", BFLOAT16])
def test_nothing_is_allocated_again_and_again(
    make: Callable[[], Reducer], wire: str | np.dtype
) -> None:
    reducer = make()
    array = np.ones(1 << 19, np.float32)
    for _ in range(2):
        finish(reducer.allreduce(array, 2, np.dtype(wire)))
    tracemalloc.start()
    try:
        finish(reducer.allreduce(array, 2, np.dtype(wire)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Less than the scratch memory. Other threads, such as the watch, allocate a little.
    assert peak < 1 << 18


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("fault", ["elsewhere", "full", "another system"])
@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_without_shared_memory(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, fault: str, hosts: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fault == "full":
        monkeypatch.setattr(os, "posix_fallocate", full)
    elif fault == "another system":
        monkeypatch.delattr(os, "posix_fallocate")
    elif WORLD.rank == 1:
        monkeypatch.setattr(socket, "recv_fds", lambda *_: os.stat("/none"))
    kind = type(chainermn.create_communicator("hierarchical"))
    comm = kind(WORLD, topology=Topology.from_hosts(hosts[: WORLD.size], WORLD.rank))
    parts = arrays(1000, "float64")
    own = parts[comm.rank].copy()
    average(comm, own)
    np.testing.assert_allclose(own, np.mean(parts, axis=0), rtol=1e-13)
    messages = [str(warning.message) for warning in recwarn]
    if comm.rank == 0:
        (message,) = messages
        rank, reason = {
            "full": (0, "No space left"),
            "elsewhere": (1, "none"),
            "another system": (0, "no attribute 'posix_fallocate'"),
        }[fault]
        assert f"rank {rank} cannot share memory" in message
        assert reason in message
    else:
        assert messages == []
    comm.finalize()


@pytest.mark.mpi(2, 3, 4)
def test_maxima_in_turns() -> None:
    reducer = in_turns()
    assert isinstance(reducer, InTurnReducer)
    for number in range(300):
        array = np.array([number * WORLD.rank, -WORLD.rank, number], np.int64)
        reducer.maximum(array)
        assert array.tolist() == [number * (WORLD.size - 1), 0, number]
    assert pack(None, Step()).size <= in_turn.MOST_INTEGERS


@pytest.mark.mpi(2, 3)
def test_what_mpi_has_to_send_is_sent_while_ranks_wait() -> None:
    reducer = in_turns()
    assert isinstance(reducer, InTurnReducer)
    # More than MPI buffers before the receiver has taken some.
    sent = [np.full(1 << 13, number) for number in range(400)]
    if WORLD.rank == 0:
        requests = [WORLD.Isend(each, 1) for each in sent]
    elif WORLD.rank == 1:
        received = np.empty_like(sent[0])
        for each in sent:
            WORLD.Recv(received, 0)
            np.testing.assert_array_equal(received, each)
    reducer.maximum(np.zeros(1, np.int64))
    if WORLD.rank == 0:
        MPI.Request.Waitall(requests)
    WORLD.Barrier()


@pytest.mark.mpi(2, 3, 4)
@pytest.mark.parametrize("kind", ["naive", "flat", "single_node", "hierarchical"])
def test_ranks_that_outnumber_cores_by_far_take_turns(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if WORLD.rank == 0:  # decides for all: others might count different cores
        monkeypatch.setattr(reducers, "cores_of_job", lambda: 0)
    comm = chainermn.create_communicator(kind)
    for n in (1, 100, 1 << 18):
        parts = arrays(n, "float32")
        own = parts[comm.rank].copy()
        average(comm, own)
        np.testing.assert_array_equal(own, mean(parts, np.dtype("f4")))
    comm.finalize()
    host = HostReducers(WORLD, Topology.of(WORLD))
    assert {type(host.everyone), type(host.intra)} == {InTurnReducer}
    host.free()
