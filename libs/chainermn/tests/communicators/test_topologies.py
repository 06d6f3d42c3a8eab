"""The algorithms on several hosts. Which ranks share a host is made up; the ranks are real."""

from __future__ import annotations

import re

import chainer
import numpy as np
import pytest
from mpi4py import MPI

from chainermn.communicators import registered
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.hierarchical_communicator import HierarchicalCommunicator
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.single_node_communicator import SingleNodeCommunicator
from chainermn.communicators.two_dimensional_communicator import TwoDimensionalCommunicator
from chainermn.transport.topology import Topology

pytestmark = pytest.mark.each_mpi

EXCHANGING = [
    kind for name, kind in registered().items() if name != "dummy" and not kind.uses_nccl
]

LAYOUTS = {2: ["aa", "ab"], 3: ["aab", "aba", "abc"], 4: ["aabb", "abab", "aaab", "abcd", "abbc"]}


def topology(hosts: str) -> Topology:
    return Topology.from_hosts(hosts, MPI.COMM_WORLD.rank)


def test_numbers_of_a_rank() -> None:
    seen = [Topology.from_hosts("babbc", rank) for rank in range(5)]
    assert [t.inter_rank for t in seen] == [0, 1, 0, 0, 2]
    assert [t.intra_rank for t in seen] == [0, 0, 1, 2, 0]
    assert [t.intra_size for t in seen] == [3, 1, 3, 3, 1]
    assert {t.inter_size for t in seen} == {3}
    assert {t.size for t in seen} == {5}
    assert {t.ranks_per_host for t in seen} == {(3, 1, 1)}


@pytest.mark.mpi(1, 2, 3, 4)
def test_one_host_for_real(comm: CommunicatorBase, mpi_ranks: int) -> None:
    assert (comm.rank, comm.size) == (MPI.COMM_WORLD.rank, mpi_ranks)
    assert (comm.intra_rank, comm.intra_size) == (comm.rank, comm.size)
    assert (comm.inter_rank, comm.inter_size) == (0, 1)
    assert comm.mpi_comm is MPI.COMM_WORLD


@pytest.mark.mpi(2, 3, 4)
@pytest.mark.parametrize("kind", EXCHANGING)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_mean_grad(kind: type[MpiCommunicatorBase], dtype: str, mpi_ranks: int) -> None:
    tolerance = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    # Fewer elements than ranks, about as many, and more; 110 in all, no multiple of 3 or 4.
    shapes = [(1,), (2, 2), (3, 5, 7)]
    everywhere = [
        [np.random.default_rng([rank, *s]).normal(size=s).astype(dtype) for s in shapes]
        for rank in range(mpi_ranks)
    ]
    for hosts in LAYOUTS[mpi_ranks]:
        place = topology(hosts)
        if kind.why_not(place):
            with pytest.raises(ValueError, match=re.escape(kind.why_not(place))):
                kind(MPI.COMM_WORLD, topology=place)
            continue
        comm = kind(MPI.COMM_WORLD, topology=place)
        model = chainer.ChainList()
        with model.init_scope():
            for index, grad in enumerate(everywhere[comm.rank]):
                parameter = chainer.Parameter(np.zeros_like(grad))
                parameter.grad = grad.copy()
                setattr(model, f"p{index}", parameter)
        comm.multi_node_mean_grad(model)
        for index in range(len(shapes)):
            grads = [replica[index].astype("float64") for replica in everywhere]
            actual = getattr(model, f"p{index}").grad
            np.testing.assert_allclose(
                actual, np.mean(grads, axis=0), rtol=tolerance, atol=tolerance
            )
            same = comm.allgather(actual)
            assert all((other == actual).all() for other in same)  # bit for bit
        comm.finalize()


@pytest.mark.mpi(3, 4)
def test_two_dimensional_refuses_hosts_of_different_size(mpi_ranks: int) -> None:
    with pytest.raises(ValueError, match=r"got 2, 1|got 3, 1"):
        TwoDimensionalCommunicator(
            MPI.COMM_WORLD, topology=topology("aab" if mpi_ranks == 3 else "aaab")
        )


@pytest.mark.mpi(2, 3)
def test_single_node_refuses_several_hosts(mpi_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"the {mpi_ranks} ranks run on 2"):
        SingleNodeCommunicator(MPI.COMM_WORLD, topology=topology("ab" + "b" * (mpi_ranks - 2)))


@pytest.mark.mpi(2)
def test_color_that_is_none(comm: CommunicatorBase) -> None:
    with pytest.raises(ValueError, match="color must be an integer from 0 to 2147483647, got -1"):
        comm.split(-comm.rank, 0)


@pytest.mark.mpi(4)
def test_split_keeps_hosts_and_settings() -> None:
    comm = HierarchicalCommunicator(
        MPI.COMM_WORLD, allreduce_grad_dtype="float16", topology=topology("aabb")
    )
    pair = comm.split(comm.rank % 2, -comm.rank)  # ranks 0 and 2, 1 and 3; in reverse order
    assert isinstance(pair, HierarchicalCommunicator)
    assert pair.allreduce_grad_dtype == np.float16
    assert (pair.size, pair.rank) == (2, 1 - comm.rank // 2)
    assert (pair.inter_size, pair.intra_size) == (2, 1)
    assert pair.allgather_obj(comm.rank) == [comm.rank % 2 + 2, comm.rank % 2]
    pair.finalize()
    comm.finalize()
