"""Gradients of models that travel in 16 bits."""

from __future__ import annotations

import chainer
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators.flat_communicator import FlatCommunicator
from chainermn.communicators.hierarchical_communicator import HierarchicalCommunicator
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.communicators.two_dimensional_communicator import TwoDimensionalCommunicator
from chainermn.transport.topology import Topology

pytestmark = pytest.mark.each_mpi

WORLD = MPI.COMM_WORLD
KINDS = [NaiveCommunicator, FlatCommunicator, HierarchicalCommunicator, TwoDimensionalCommunicator]
SHAPES = [(7, 11), (), (70000,), (3,)]


def make(kind: type[MpiCommunicatorBase], hosts: str, wire: object) -> MpiCommunicatorBase:
    place = Topology.from_hosts(hosts[: WORLD.size], WORLD.rank)
    return kind(WORLD, topology=place, allreduce_grad_dtype=wire)


def gradients(rank: int) -> list[np.ndarray]:
    generator = np.random.default_rng(rank)
    return [np.asarray(generator.normal(0, 1e-3, shape), "f") for shape in SHAPES]


def model(grads: list[np.ndarray]) -> chainer.ChainList:
    result = chainer.ChainList()
    with result.init_scope():
        for index, grad in enumerate(grads):
            parameter = chainer.Parameter(np.zeros(grad.shape, "f"))
            parameter.grad = grad.copy()
            setattr(result, f"p{index}", parameter)
    return result


@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_error_is_that_of_rounding_there_and_back(kind: type, wire: str) -> None:
    info = ml_dtypes.finfo(wire)
    for hosts in ("aaaa", "abab", "abcd"):
        comm = make(kind, hosts, wire)
        shared = model(gradients(comm.rank))
        comm.multi_node_mean_grad(shared)
        everywhere = [gradients(rank) for rank in range(comm.size)]
        for index in range(len(SHAPES)):
            parts = [grads[index].astype("f8") for grads in everywhere]
            allowed = 0.5 * float(info.eps) * (np.max(np.abs(parts)) * 2) + float(info.tiny)
            actual = getattr(shared, f"p{index}").grad
            assert actual.dtype == np.float32
            assert np.abs(actual - np.mean(parts, axis=0)).max(initial=0) <= allowed
            assert all((other == actual).all() for other in comm.allgather(actual))
        comm.finalize()


@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
def test_same_bits_by_shared_memory_and_by_mpi_and_in_other_buckets(wire: str | None) -> None:
    results = []
    one_host = "aaaa" if wire is None else "abab"
    for kind, hosts in ((NaiveCommunicator, one_host), (FlatCommunicator, "abcd")):
        comm = make(kind, hosts, wire)
        shared = model(gradients(comm.rank))
        comm.multi_node_mean_grad(shared)
        results.append([getattr(shared, f"p{index}").grad for index in range(len(SHAPES))])
        comm.finalize()
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("kind", [NaiveCommunicator, HierarchicalCommunicator])
@pytest.mark.parametrize("hosts", ["abb", "aba"])
def test_overflow_is_reported_on_all_ranks(kind: type, hosts: str) -> None:
    comm = make(kind, hosts, "float16")
    grads = gradients(comm.rank)
    if comm.rank == 1:
        grads[2][5] = 3e5
    shared = model(grads)
    with pytest.raises(
        OverflowError, match=r"wire: /p2 \(up to .*e\+05 on rank .*bfloat16"
    ) as raised:
        comm.multi_node_mean_grad(shared)
    assert "/p1" not in str(raised.value)
    comm.set_config("allreduce_grad_dtype", "bfloat16")
    comm.multi_node_mean_grad(model(grads))
    comm.finalize()


@pytest.mark.mpi(2)
def test_overflow_is_left_to_loss_scaling() -> None:
    comm = make(NaiveCommunicator, "ab", "float16")
    grads = gradients(comm.rank)
    grads[0][...] = 7e4
    shared = model(grads)
    shared.p1._loss_scale = 8.0
    comm.multi_node_mean_grad(shared)
    assert np.isinf(shared.p0.grad).all()
    del shared.p1._loss_scale
    grads[0][...] = np.inf  # from the model, not from rounding
    comm.multi_node_mean_grad(model(grads))


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("hosts", ["aaa", "abc"])
@pytest.mark.parametrize("wire", [None, "float16", "bfloat16", "float32"])
def test_what_is_not_finite_travels_silently(hosts: str, wire: str | None) -> None:
    comm = make(NaiveCommunicator, hosts, wire)
    for dtype in ("float32", "float64"):
        buffer = np.ones(20000, dtype)
        buffer[3] = np.inf if comm.rank == 0 else -np.inf
        buffer[4] = np.inf
        buffer[-1] = np.nan if comm.rank == 1 else 1
        shared = model([])
        with shared.init_scope():
            shared.p0 = chainer.Parameter(np.zeros_like(buffer))
        shared.p0.grad = buffer
        comm.multi_node_mean_grad(shared)
        assert np.isnan(buffer[[3, -1]]).all()
        assert buffer[4] == np.inf
        np.testing.assert_array_equal(np.delete(buffer, [3, 4, -1]), 1)
    comm.finalize()


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_nothing_is_rounded_that_stays_on_the_host(kind: type, wire: str) -> None:
    comm = make(kind, "aaa", wire)
    shared = model([np.full(3, 1 + 2.0**-20, "f"), np.full((2, 2), 1e6 * comm.rank, "f")])
    comm.multi_node_mean_grad(shared)
    assert (shared.p0.grad == np.float32(1 + 2.0**-20)).all()
    assert (shared.p1.grad == np.float32(5e5 * (comm.size - 1))).all()
    comm.finalize()


@pytest.mark.mpi(2)
def test_name_that_is_no_dtype() -> None:
    with pytest.raises(ValueError, match=r"must be float16, bfloat16, .* got 'auto'"):
        chainermn.create_communicator("naive", allreduce_grad_dtype="auto")


@pytest.mark.mpi(2)
def test_several_at_once() -> None:
    comms = [make(kind, "ab", wire) for kind in KINDS for wire in (None, "bfloat16")]
    models = [
        model([np.full((3, 4), 2.0 * (comm.rank + index), "f")])
        for index, comm in enumerate(comms)
    ]
    for _ in range(2):
        for index, comm in enumerate(comms):
            comm.multi_node_mean_grad(models[index])
    for index, shared in enumerate(models):
        assert (shared.p0.grad == 2 * index + 1).all()
    for comm in reversed(comms):
        comm.finalize()
